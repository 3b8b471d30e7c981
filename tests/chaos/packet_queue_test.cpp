// The cable of the fault campaign loses, delays and reorders as it is told, and nothing else.
#include "tests/chaos/packet_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace penstock::test {
namespace packet_queue_test {

using chaos::LinkQuality;
using chaos::PacketQueue;
using namespace std::chrono_literals;

const PacketQueue::Time kStart{1000s};

std::vector<int> all_by(PacketQueue& queue, PacketQueue::Time now) {
  std::vector<int> numbers;
  while (auto packet = queue.pop(now)) numbers.push_back(std::stoi(*packet));
  return numbers;
}

std::vector<int> sent_and_received(const LinkQuality& quality, int packets, std::uint64_t seed = 1) {
  PacketQueue queue(seed);
  for (int i = 0; i < packets; ++i) queue.push(kStart + i * 100us, std::to_string(i), quality);
  return all_by(queue, kStart + 100s);
}

TEST(PacketQueue, AGoodCableChangesNothing) {
  const std::vector<int> received = sent_and_received({}, 1000);
  ASSERT_EQ(received.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(received.begin(), received.end()));
}

TEST(PacketQueue, LosesTheShareAndKeepsTheOrder) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const std::vector<int> received = sent_and_received({.loss = 0.1}, 20000, seed);
    EXPECT_GT(received.size(), 17700u);
    EXPECT_LT(received.size(), 18300u);
    EXPECT_TRUE(std::is_sorted(received.begin(), received.end()));
  }
}

TEST(PacketQueue, DelaysAndJitterKeepTheOrder) {
  PacketQueue queue(5);
  const LinkQuality quality{.delay_ms = 20, .jitter_ms = 10};
  for (int i = 0; i < 100; ++i) queue.push(kStart, std::to_string(i), quality);
  EXPECT_TRUE(all_by(queue, kStart + 19ms).empty());
  ASSERT_TRUE(queue.next_arrival().has_value());
  EXPECT_GE(*queue.next_arrival(), kStart + 20ms);
  const std::vector<int> received = all_by(queue, kStart + 31ms);
  EXPECT_EQ(received.size(), 100u);
  EXPECT_TRUE(std::is_sorted(received.begin(), received.end()));
  EXPECT_FALSE(queue.next_arrival().has_value());
}

TEST(PacketQueue, ReordersAndLosesNothing) {
  std::vector<int> received = sent_and_received({.reorder = 0.2}, 5000);
  EXPECT_FALSE(std::is_sorted(received.begin(), received.end()));
  std::sort(received.begin(), received.end());
  ASSERT_EQ(received.size(), 5000u);
  EXPECT_EQ(received.front(), 0);
  EXPECT_EQ(received.back(), 4999);
}

TEST(PacketQueue, ALimitedRateTakesItsTimeAndDropsWhatDoesNotFit) {
  PacketQueue queue(1);
  const LinkQuality quality{.mbit_s = 1};
  for (int i = 0; i < 10; ++i) queue.push(kStart, std::string(1250, 'x'), quality);  // 10 ms each
  int arrived = 0;
  while (queue.pop(kStart + 51ms)) ++arrived;
  EXPECT_EQ(arrived, 5);
  while (queue.pop(kStart + 1s)) ++arrived;
  EXPECT_EQ(arrived, 10);
  for (int i = 0; i < 1000; ++i) queue.push(kStart + 1s, std::string(1250, 'x'), quality);
  arrived = 0;
  while (queue.pop(kStart + 1000s)) ++arrived;
  EXPECT_GT(arrived, 20);
  EXPECT_LT(arrived, 30);
}

TEST(PacketQueue, ACutCableCarriesNothing) {
  EXPECT_TRUE(sent_and_received({.cut = true}, 100).empty());
  PacketQueue queue(1);
  queue.push(kStart, "1", {.delay_ms = 5});
  queue.clear();
  EXPECT_TRUE(all_by(queue, kStart + 1s).empty());
}

}  // namespace packet_queue_test
}  // namespace penstock::test
