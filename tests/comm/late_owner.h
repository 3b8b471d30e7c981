// For tests of who destroys a group: a transfer that, when it is interrupted, holds the interrupting thread
// until nobody else owns the group. If that thread is an owner itself, it is then the last one.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "penstock/comm/group/work_state.h"

namespace penstock::test {

// State of the world of rank 0 of one: without a monitor, and without a backend.
inline std::shared_ptr<comm::WorldCore> lone_core() {
  using namespace std::chrono_literals;
  return std::make_shared<comm::WorldCore>(comm::WorldCore{.env = {},
                                                           .store = comm::Store::in_process(),
                                                           .liveness = std::make_shared<comm::Liveness>(1),
                                                           .monitor = nullptr,
                                                           .timeout = 60s});
}

class LateOwner final : public comm::Transfer {
 public:
  explicit LateOwner(std::weak_ptr<comm::GroupState> group) : group_(std::move(group)) {}

  void interrupt() noexcept override {
    using namespace std::chrono_literals;
    interrupted = true;
    const auto deadline = comm::Clock::now() + 10s;
    while (group_.use_count() > 1 && comm::Clock::now() < deadline) std::this_thread::sleep_for(1ms);
    // Released by the others: whoever is left is this thread.
    for (int i = 0; i < 5000 && group_.use_count() > 0; ++i) std::this_thread::sleep_for(1ms);
    owned_here = group_.use_count() > 0;
    returned = true;
  }
  comm::WaitResult wait(comm::Clock::time_point) override { return comm::WaitResult::Interrupted; }
  bool done() override { return false; }

  std::atomic<bool> interrupted = false;  // the call has begun
  std::atomic<bool> owned_here = false;   // the interrupting thread owned the group
  std::atomic<bool> returned = false;

 private:
  const std::weak_ptr<comm::GroupState> group_;
};

// A wait that never ends, on a group that it does not own.
class EndlessWait {
 public:
  EndlessWait(const std::shared_ptr<comm::GroupState>& group, const comm::ExpectedTransfer& expected)
      : work_(std::make_shared<comm::GroupState>(lone_core(), "another", std::vector<int>{0}, group->timeout),
              "recv", "", std::nullopt, 0, std::nullopt),
        late_owner(group) {
    work_.expect(expected);
    // Never ends: the group may be destroyed before it.
    new comm::GroupWaits::Scope(*group->waits, late_owner, work_, comm::Clock::now() + group->timeout);
  }

 private:
  comm::WorkState work_;

 public:
  LateOwner late_owner;
};

}  // namespace penstock::test
