// Notifies every rank quickly when another rank dies, fails or leaves.
//
// Each rank keeps one idle TCP connection to rank 0. The kernel closes it when a process dies for any reason,
// so rank 0 learns of a death at once and notifies the others; when rank 0 itself dies, all connections
// close. Costs nothing in normal operation: one thread sleeping in poll. TCP keep-alive detects a host that
// disappears.
//
// The connections carry small framed notices (Hello, Left, Failed, Lost). A client that connects must present
// the world's secret, which is only in the store.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/rendezvous/store.h"
#include "penstock/comm/transport/liveness.h"

namespace penstock::comm {

class Monitor {
 public:
  // Collective over the world. Reports into `liveness` from its own thread.
  Monitor(const LaunchEnv& env, const Store& store, std::shared_ptr<Liveness> liveness,
          Clock::time_point deadline);

  // Announces that this rank leaves, unless `fail` was called. Never waits for another rank.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // Reports to all other ranks that this one failed, and why. Returns once the notice is handed to the kernel
  // or a second has passed.
  void fail(const std::string& reason) noexcept;

 private:
  class Loop;
  std::shared_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace penstock::comm
