// Runs calls that may never return, one at a time on a separate thread; the caller stops waiting after a time
// limit.
//
//   CallWithTimeout caller;
//   caller.run([store, key] { store->set(key, "x"); }, 2s);      // false if it has not returned by then
//
// An abandoned call keeps running, so it must own everything it uses. While it is stuck, every further call
// fails at once. Thread safe; calls from several threads wait for each other, and that time counts towards
// their limits. No Torch.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace penstock::comm {

class CallWithTimeout {
 public:
  CallWithTimeout();
  // Does not wait for a stuck call.
  ~CallWithTimeout();
  CallWithTimeout(const CallWithTimeout&) = delete;
  CallWithTimeout& operator=(const CallWithTimeout&) = delete;

  // Returns false if the call was abandoned or another one is stuck. Rethrows what the call throws.
  [[nodiscard]] bool run(std::function<void()> call, std::chrono::milliseconds limit);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace penstock::comm
