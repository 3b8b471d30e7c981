// Notifies every rank quickly when another rank dies, fails, leaves or falls silent.
//
// Each rank keeps one connection to rank 0. The kernel closes it when a process dies for any reason, so rank
// 0 learns of a death at once and notifies the others; when rank 0 itself dies, all connections close. Both
// ends say now and then that they are alive: an end that says nothing for longer than the world's timeout is
// stopped, or its host or the network to it is down. Costs nothing in normal operation: one thread that
// sleeps.
//
// The connections carry small notices (NoticeKind) in authenticated frames (comm/secure): nobody without the
// job's secret can read a notice's meaning into them, send one or pretend to be a rank.
//
// Rank 0 leaves last: its destructor waits until the other ranks have left, so that they hear of each other
// until then.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "penstock/base/env.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/comm/rendezvous/store.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/comm/transport/liveness.h"

namespace penstock::comm {

class Monitor {
 public:
  // Collective over the world. Reports into `liveness` from its own thread. `timeout`: of the world.
  Monitor(const LaunchEnv& env, const Store& store, std::shared_ptr<Liveness> liveness,
          Clock::time_point deadline, std::chrono::milliseconds timeout = default_timeout());

  // Announces that this rank leaves, unless `fail` was called. Rank 0 then waits until the others have left:
  // at most for the timeout, and for two seconds once a rank has failed. The others never wait.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // Reports to all other ranks that this one failed, and why. Returns once the notice is handed to the kernel
  // or a second has passed.
  void fail(const std::string& reason) noexcept;

  // Reports to all other ranks that another one is lost, as this rank's launcher says.
  void report_lost(int rank, const std::string& reason) noexcept;

  // Of the secret by which the ranks recognize each other: PENSTOCK_SECRET, or else a random one that rank 0
  // has put into the store.
  const JobKey& key() const;

  // One end of the connections: rank 0's, or another rank's.
  class End;

 private:
  void tell(const std::string& what, const std::function<void()>& post) noexcept;

  const int rank_;
  bool failed_ = false;
  std::mutex mutex_;  // guards failed_
  std::shared_ptr<End> end_;
};

}  // namespace penstock::comm
