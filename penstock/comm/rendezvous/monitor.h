// Tells every rank within moments when another rank dies, fails or leaves.
//
// Each rank keeps one idle TCP connection to rank 0. The kernel closes it when a process dies, however it dies, so rank 0
// learns of a death at once and tells everybody; when rank 0 itself dies, all connections close. Costs nothing while all
// is well: one thread sleeping in poll. A host that vanishes is noticed by TCP keep-alive.
//
// The connections carry small framed notices (Hello, Left, Failed, Lost). A stranger that connects must present the
// world's secret, which is only in the store.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/transport/liveness.h"
#include "penstock/comm/rendezvous/store.h"

namespace penstock::comm {

class Monitor {
 public:
  // Collective over the world. Reports into `liveness` from its own thread.
  Monitor(const LaunchEnv& env, const Store& store, std::shared_ptr<Liveness> liveness, Clock::time_point deadline);

  // Leaves in order unless `fail` was called. Bounded: never waits for another rank.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // Tells all other ranks that this one failed, and why. Returns once the notice is handed to the kernel or a second
  // has passed.
  void fail(const std::string& reason) noexcept;

 private:
  class Loop;
  std::shared_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace penstock::comm
