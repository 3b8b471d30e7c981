// Threads that look at a group from outside, and threads of backends, never destroy it.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "penstock/comm/group/stall_watch.h"
#include "penstock/errors.h"
#include "penstock/world.h"
#include "tests/comm/late_owner.h"

namespace penstock::comm {
namespace group_owner_test {

using namespace std::chrono_literals;
using test::EndlessWait;

void await(const std::atomic<bool>& flag) {
  const auto deadline = Clock::now() + 20s;
  while (!flag && Clock::now() < deadline) std::this_thread::sleep_for(1ms);
  ASSERT_TRUE(flag);
}

// The state of a group of two ranks in this process, without backends.
std::shared_ptr<GroupState> state_of(int rank, const Store& store) {
  const auto core = test::lone_core();
  core->env.rank = rank;
  core->env.world_size = 2;
  core->store = store;
  core->liveness = std::make_shared<Liveness>(2);
  auto group = std::make_shared<GroupState>(core, "pair", std::vector<int>{0, 1}, 60s);
  group->follow_liveness();
  return group;
}

TEST(GroupOwner, AThreadThatReportsALossIsNotOne) {
  auto group = state_of(0, Store::in_process());
  EndlessWait wait(group, {});
  const auto liveness = group->world->liveness;
  std::thread monitor([&] { liveness->report({1, RankState::Lost, "for the test"}); });
  await(wait.late_owner.interrupted);
  group.reset();
  monitor.join();
  EXPECT_FALSE(wait.late_owner.owned_here);
}

TEST(GroupOwner, TheStallWatchIsNotOneAndIsAwaited) {
  const Store store = Store::in_process();
  auto group = state_of(0, store), other = state_of(1, store);
  EndlessWait wait(group, {true, 1, Contract::of(at::zeros({4}), 0, 0)});
  EndlessWait others_wait(other, {false, 0, Contract::of(at::zeros({8}), 0, 0)});
  watch_for_stalls(group->waits);
  watch_for_stalls(other->waits);
  // The watch finds the difference at the second of them.
  std::thread second([&] {
    while (!wait.late_owner.interrupted && !others_wait.late_owner.interrupted)
      std::this_thread::sleep_for(1ms);
    other.reset();
  });
  while (!wait.late_owner.interrupted && !others_wait.late_owner.interrupted)
    std::this_thread::sleep_for(1ms);
  auto& owner = wait.late_owner.interrupted ? wait.late_owner : others_wait.late_owner;
  group.reset();
  second.join();
  EXPECT_TRUE(owner.returned) << "a group ends after the check of its waits";
  EXPECT_FALSE(owner.owned_here);
}

// A backend that cannot be stopped after a failure may still write to the memory of its last operation.
TEST(GroupOwner, MemoryOfAnAbandonedOperationIsKept) {
  at::Tensor tensor = at::ones({8});
  EXPECT_THROW(run_ranks(2, 60s,
                         [&](World& world) {
                           if (world.rank() == 0) world.group().all_reduce(tensor).wait(200ms);
                           std::this_thread::sleep_for(1s);
                         }),
               TimeoutError);
  EXPECT_GE(tensor.use_count(), 2u);
}

}  // namespace group_owner_test
}  // namespace penstock::comm
