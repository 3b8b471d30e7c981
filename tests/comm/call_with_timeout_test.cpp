#include "penstock/comm/transport/call_with_timeout.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

namespace penstock::comm {
namespace call_with_timeout_test {

using namespace std::chrono_literals;

TEST(CallWithTimeout, RunsOneAfterTheOther) {
  CallWithTimeout caller;
  std::atomic<int> inside = 0, most = 0, runs = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int j = 0; j < 50; ++j)
        EXPECT_TRUE(caller.run(
            [&] {
              most = std::max(most.load(), ++inside);
              ++runs;
              --inside;
            },
            60s));
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(runs, 200);
  EXPECT_EQ(most, 1);
}

TEST(CallWithTimeout, ThrowsWhatTheCallThrows) {
  CallWithTimeout caller;
  EXPECT_THROW((void)caller.run([] { throw std::out_of_range("gone"); }, 60s), std::out_of_range);
  EXPECT_TRUE(caller.run([] {}, 60s));
}

// The call is abandoned, then all further ones fail at once; usable again when the stuck call returns after
// all.
TEST(CallWithTimeout, GivesUp) {
  CallWithTimeout caller;
  const auto release = std::make_shared<std::promise<void>>();
  EXPECT_FALSE(caller.run([release] { release->get_future().wait(); }, 50ms));
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<bool> ran = false;
  EXPECT_FALSE(caller.run([&] { ran = true; }, 60s));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
  release->set_value();
  for (int i = 0; i < 6000 && !caller.run([&] { ran = true; }, 60s); ++i) std::this_thread::sleep_for(10ms);
  EXPECT_TRUE(ran);
}

// A caller that waits after a stuck call also gives up, and its call is never run.
TEST(CallWithTimeout, WaitersAfterAStuckCallGiveUp) {
  CallWithTimeout caller;
  const auto release = std::make_shared<std::promise<void>>();
  const auto ran = std::make_shared<std::atomic<bool>>(false);
  std::promise<void> started;
  std::thread first([&, release] {
    EXPECT_FALSE(caller.run(
        [&, release] {
          started.set_value();
          release->get_future().wait();
        },
        300ms));
  });
  started.get_future().wait();
  EXPECT_FALSE(caller.run([ran] { *ran = true; }, 20ms));
  first.join();
  release->set_value();
  for (int i = 0; i < 6000 && !caller.run([] {}, 60s); ++i) std::this_thread::sleep_for(10ms);
  EXPECT_FALSE(*ran);
}

TEST(CallWithTimeout, IsDestroyedWithACallStuck) {
  const auto release = std::make_shared<std::promise<void>>();
  {
    CallWithTimeout caller;
    EXPECT_FALSE(caller.run([release] { release->get_future().wait(); }, 20ms));
  }
  release->set_value();
}

}  // namespace call_with_timeout_test
}  // namespace penstock::comm
