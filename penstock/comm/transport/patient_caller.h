// Runs calls that may never return, on a thread of their own, one after the other: whoever calls gives up after a while.
//
//   PatientCaller caller;
//   caller.run([store, key] { store->set(key, "x"); }, 2s);      // false when it has not returned by then
//
// A call that was given up goes on, if it ever does; so it must own whatever it uses. While it is stuck every further call fails at once.
// No Torch. Thread safe; calls of several threads wait for each other, and that counts.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace penstock::comm {

class PatientCaller {
 public:
  PatientCaller();
  // Leaves a stuck call behind.
  ~PatientCaller();
  PatientCaller(const PatientCaller&) = delete;
  PatientCaller& operator=(const PatientCaller&) = delete;

  // False: it was given up, or another one is stuck. What the call throws is thrown here.
  [[nodiscard]] bool run(std::function<void()> call, std::chrono::milliseconds limit);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace penstock::comm
