// Batches prepared ahead of time.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include "penstock/errors.h"
#include "penstock/train/data/prefetcher.h"
#include "penstock/train/data/token_shard_writer.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"

namespace penstock::train {
namespace prefetcher_test {

using test::has_text;
using test::message_of;
using test::ScratchFolder;

void fill_with_round(std::uint64_t round, Batch& batch) {
  batch.position = round;
  batch.tokens.assign(4, static_cast<std::int64_t>(round));
}

TEST(Prefetcher, BatchesInOrderAndPositionOfConsumedOnes) {
  Prefetcher prefetcher(fill_with_round, {.first = 100, .stride = 8, .share = {0, 8}, .depth = 3});
  EXPECT_EQ(prefetcher.position(), 100U);
  Batch batch;
  for (std::uint64_t i = 0; i < 500; ++i) {
    prefetcher.next(batch);
    EXPECT_EQ(batch.position, 100 + 8 * i);
    EXPECT_EQ(batch.tokens.at(3), static_cast<std::int64_t>(100 + 8 * i));
    EXPECT_EQ(prefetcher.position(), 108 + 8 * i);
  }
}

TEST(Prefetcher, FetchesAtMostItsDepth) {
  std::atomic<int> made{0};
  Prefetcher prefetcher(
      [&](std::uint64_t round, Batch& batch) {
        fill_with_round(round, batch);
        ++made;
      },
      {.depth = 3});
  while (made < 3) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(made, 3);
  EXPECT_EQ(prefetcher.position(), 0U);  // nothing was consumed
  Batch batch;
  prefetcher.next(batch);
  while (made < 4) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(made, 4);
}

TEST(Prefetcher, AnErrorComesAfterTheBatchesBeforeIt) {
  Prefetcher prefetcher(
      [](std::uint64_t round, Batch& batch) {
        if (round == 5) throw std::runtime_error("round five");
        fill_with_round(round, batch);
      },
      {.depth = 2});
  Batch batch;
  for (int i = 0; i < 5; ++i) prefetcher.next(batch);
  for (int again = 0; again < 3; ++again)
    EXPECT_EQ(message_of<std::runtime_error>([&] { prefetcher.next(batch); }), "round five");
  EXPECT_EQ(prefetcher.position(), 5U);
  EXPECT_EQ(batch.position, 4U);  // the consumer's batch is unchanged
}

TEST(Prefetcher, StopWakesAConsumerThatWaits) {
  std::promise<void> release;
  Prefetcher prefetcher([gate = release.get_future().share()](std::uint64_t, Batch&) { gate.wait(); }, {});
  std::thread stopper([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    prefetcher.stop();
  });
  Batch batch;
  EXPECT_TRUE(has_text(message_of<StateError>([&] { prefetcher.next(batch); }), "next after stop"));
  stopper.join();
  release.set_value();
}

TEST(Prefetcher, EndsAtAnyMoment) {
  for (int i = 0; i < 200; ++i) {
    Prefetcher prefetcher(fill_with_round, {.depth = static_cast<std::size_t>(1 + i % 3)});
    Batch batch;
    for (int k = 0; k < i % 5; ++k) prefetcher.next(batch);
  }
}

TEST(Prefetcher, WhatItRefuses) {
  EXPECT_THROW(Prefetcher(fill_with_round, {.stride = 0}), ValueError);
  EXPECT_THROW(Prefetcher(fill_with_round, {.depth = 0}), ValueError);
  EXPECT_THROW(Prefetcher(fill_with_round, {.stride = 4, .share = {2, 3}}), ValueError);
  EXPECT_THROW(Prefetcher(fill_with_round, {.stride = 4, .share = {0, 0}}), ValueError);
  EXPECT_THROW(Prefetcher(fill_with_round, {.stride = 4, .share = {~std::uint64_t{0}, 4}}), ValueError);
}

TEST(Prefetcher, ARankGetsItsShareAndARunContinuesUnderAnotherLayout) {
  const ScratchFolder folder;
  {
    TokenShardWriter writer(folder / "a.tokens", {.vocabulary = 65536, .end_of_document = 65535});
    std::vector<std::uint32_t> document(1000);
    for (std::uint32_t i = 0; i < 1000; ++i) document[i] = i;
    writer.add_document(document, 1);
    writer.finish();
  }
  const auto dataset = TokenDataset::open(folder.path(), DataSplit::All, 0);
  const auto sampler = std::make_shared<const Sampler>(dataset, SamplerOptions{.context = 9, .seed = 4});
  Batch whole;
  sampler->fill(0, 40, whole);
  std::vector<std::int64_t> joined;
  std::uint64_t position = 0;
  for (const int dp : {2, 1, 4}) {  // two steps of eight samples under each layout
    std::vector<std::unique_ptr<Prefetcher>> ranks;
    for (int rank = 0; rank < dp; ++rank)
      ranks.push_back(std::make_unique<Prefetcher>(
          sampler, PrefetchOptions{.first = position, .stride = 8, .share = sample_share(8, rank, dp)}));
    Batch batch;
    for (int step = 0; step < 2 && joined.size() < whole.tokens.size(); ++step) {
      for (auto& rank : ranks) {
        rank->next(batch);
        joined.insert(joined.end(), batch.tokens.begin(), batch.tokens.end());
      }
    }
    position = ranks.front()->position();
  }
  ASSERT_EQ(joined.size(), whole.tokens.size());
  EXPECT_EQ(joined, whole.tokens);
}

}  // namespace prefetcher_test
}  // namespace penstock::train
