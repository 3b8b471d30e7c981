// What long waits leave behind.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "penstock/comm/group/work_state.h"
#include "tests/comm/late_owner.h"

namespace penstock::comm {
namespace group_waits_test {

using namespace std::chrono_literals;

class NeverDone final : public Transfer {
 public:
  void interrupt() noexcept override {}
  WaitResult wait(Clock::time_point) override { return WaitResult::Interrupted; }
  bool done() override { return false; }
};

TEST(GroupWaits, WhatTheyPostIsWithdrawn) {
  const auto core = test::lone_core();
  const auto store = core->store;
  GroupWaits waits(store, "group", {0, 1}, 0);
  const auto group = std::make_shared<GroupState>(core, "group", std::vector<int>{0}, 60s);
  const std::int64_t before = store.for_c10d()->getNumKeys();
  for (int tag = 0; tag < 3; ++tag) {
    NeverDone transfer;
    WorkState work(group, "recv", "", std::nullopt, 0, std::nullopt);
    work.expect({.sends = false, .position = 1, .contract = Contract::of(at::zeros({4}), tag, 0)});
    {
      const GroupWaits::Scope wait(waits, transfer, work, Clock::now() + 60s);
      waits.check();
      EXPECT_EQ(store.for_c10d()->getNumKeys(), before);  // it has only just begun
      std::this_thread::sleep_for(350ms);
      waits.check();
      EXPECT_GT(store.for_c10d()->getNumKeys(), before);
    }
    waits.withdraw_posts();
    // A status is set to nothing.
    EXPECT_LE(store.for_c10d()->getNumKeys(), before + 1);
  }
}

TEST(GroupNumbers, CountOnlyTheTagsOfUsers) {
  const auto group = std::make_shared<GroupState>(test::lone_core(), "group", std::vector<int>{0}, 60s);
  EXPECT_EQ(group->next_number(true, 0, 5), 0u);
  EXPECT_EQ(group->next_number(true, 0, 5), 1u);
  EXPECT_EQ(group->next_number(false, 0, 5), 0u);
  const int internal = group->internal_tag(5, 0);
  EXPECT_EQ(group->next_number(true, 0, internal), 0u);
  EXPECT_EQ(group->next_number(true, 0, internal), 0u);
}

}  // namespace group_waits_test
}  // namespace penstock::comm
