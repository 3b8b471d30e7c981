// The keyed permutation and the samples of a run.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

#include "penstock/errors.h"
#include "penstock/train/data/keyed_permutation.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/data/token_shard_writer.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"

namespace penstock::train {
namespace sampler_test {

using test::has_text;
using test::message_of;
using test::ScratchFolder;

bool is_permutation_of_range(const KeyedPermutation& order) {
  std::vector<bool> seen(order.size(), false);
  for (std::uint64_t i = 0; i < order.size(); ++i) {
    const std::uint64_t value = order(i);
    if (value >= order.size() || seen[value] || order.inverse(value) != i) return false;
    seen[value] = true;
  }
  return true;
}

TEST(KeyedPermutation, EverySmallSize) {
  for (std::uint64_t size = 1; size <= 300; ++size)
    EXPECT_TRUE(is_permutation_of_range(KeyedPermutation(size, 7, size))) << size;
  EXPECT_TRUE(is_permutation_of_range(KeyedPermutation(100003, 1, 0)));
}

TEST(KeyedPermutation, HugeSizes) {
  for (const std::uint64_t size :
       {std::uint64_t{1} << 62, (std::uint64_t{1} << 62) - 1, (std::uint64_t{1} << 60) + 1}) {
    const KeyedPermutation order(size, 5, 6);
    for (std::uint64_t i = 0; i < 100; ++i) {
      EXPECT_LT(order(i), size);
      EXPECT_EQ(order.inverse(order(i)), i);
    }
  }
}

TEST(KeyedPermutation, LooksShuffled) {
  // Sums over the first half, and the number of neighbours that stay neighbours, are as in a random order.
  const std::uint64_t size = 10000;
  const KeyedPermutation order(size, 1, 2);
  double sum = 0;
  int neighbours = 0;
  for (std::uint64_t i = 0; i < size / 2; ++i) {
    sum += static_cast<double>(order(i));
    if (order(i) + 1 == order(i + 1)) ++neighbours;
  }
  EXPECT_NEAR(sum / (size / 2.0), size / 2.0, 100);  // the standard deviation is 29
  EXPECT_LE(neighbours, 5);
}

TEST(KeyedPermutation, OtherSeedsAndStreamsGiveOtherOrders) {
  std::set<std::vector<std::uint64_t>> orders;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    for (std::uint64_t stream = 0; stream < 4; ++stream) {
      const KeyedPermutation order(50, seed, stream);
      std::vector<std::uint64_t> values;
      for (std::uint64_t i = 0; i < 50; ++i) values.push_back(order(i));
      orders.insert(values);
    }
  }
  EXPECT_EQ(orders.size(), 16U);
}

TEST(KeyedPermutation, TheOrderIsFixedForever) {
  // Saved positions become invalid if this changes.
  const KeyedPermutation order(10, 1, 0);
  std::string text;
  for (std::uint64_t i = 0; i < 10; ++i) text += std::to_string(order(i)) + " ";
  EXPECT_EQ(text, "3 8 7 9 5 0 1 6 2 4 ");
}

TEST(KeyedPermutation, Refuses) {
  EXPECT_THROW(KeyedPermutation(0, 0, 0), ValueError);
  EXPECT_THROW(KeyedPermutation((std::uint64_t{1} << 62) + 1, 0, 0), ValueError);
  EXPECT_THROW((void)KeyedPermutation(3, 0, 0)(3), ValueError);
  EXPECT_THROW((void)KeyedPermutation(3, 0, 0).inverse(3), ValueError);
}

// Documents of the given lengths (each with its end token), over two shards; token values count through the
// dataset.
struct Made {
  ScratchFolder folder;
  std::shared_ptr<const TokenDataset> dataset;
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> documents;
};

std::unique_ptr<Made> make_dataset(const std::vector<int>& lengths) {
  auto made = std::make_unique<Made>();
  std::uint32_t next = 0;
  const std::size_t half = (lengths.size() + 1) / 2;
  for (std::size_t shard = 0; shard < 2; ++shard) {
    if (shard == 1 && half == lengths.size()) break;
    TokenShardWriter writer(made->folder / (shard == 0 ? "a.tokens" : "b.tokens"),
                            {.vocabulary = 65536, .end_of_document = 65535});
    for (std::size_t d = shard == 0 ? 0 : half; d < (shard == 0 ? half : lengths.size()); ++d) {
      std::vector<std::uint32_t> document;
      for (int i = 0; i < lengths[d]; ++i) document.push_back(next++);
      writer.add_document(document, d);
      made->tokens.insert(made->tokens.end(), document.begin(), document.end());
      made->tokens.push_back(65535);
      made->documents.insert(made->documents.end(), document.size() + 1, static_cast<std::int64_t>(d));
    }
    writer.finish();
  }
  made->dataset = TokenDataset::open(made->folder.path(), DataSplit::All, 0);
  return made;
}

Batch batch_of(const Sampler& sampler, std::uint64_t position, std::int64_t samples) {
  Batch batch;
  sampler.fill(position, samples, batch);
  return batch;
}

TEST(Sampler, InOrderWithoutShuffle) {
  const auto made = make_dataset({3, 2, 4});  // 0 1 2 E | 3 4 E | 5 6 7 8 E
  const Sampler sampler(made->dataset, {.context = 5, .seed = 1, .shuffle = false});
  EXPECT_EQ(sampler.samples_per_epoch(), 2U);
  const Batch batch = batch_of(sampler, 0, 3);
  const std::int64_t e = 65535;
  EXPECT_EQ(batch.tokens, (std::vector<std::int64_t>{0, 1, 2, e, 3, 4, e, 5, 6, 7, 0, 1, 2, e, 3}));
  EXPECT_EQ(batch.targets,
            (std::vector<std::int64_t>{1, 2, e, kIgnored, 4, e, kIgnored, 6, 7, 8, 1, 2, e, kIgnored, 4}));
  EXPECT_EQ(batch.documents, (std::vector<std::int64_t>{0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 1}));
}

TEST(Sampler, AWindowAcrossTheEndDoesNotJoinDocuments) {
  const auto made =
      make_dataset({9});  // one document, ten tokens: every window but the first wraps or ends at the end
  const Sampler sampler(made->dataset, {.context = 7, .seed = 3});
  bool wrapped = false;
  for (std::uint64_t position = 0; position < 40; ++position) {
    const Batch batch = batch_of(sampler, position, 1);
    for (std::size_t i = 0; i < 7; ++i) {
      if (batch.tokens[i] == 65535) {
        EXPECT_EQ(batch.targets[i], kIgnored);
        if (i + 1 < 7) {
          wrapped = true;
          EXPECT_NE(batch.documents[i], batch.documents[i + 1]);
        }
      } else {
        EXPECT_EQ(batch.targets[i], batch.tokens[i] == 8 ? 65535 : batch.tokens[i] + 1);
      }
    }
  }
  EXPECT_TRUE(wrapped);
}

TEST(Sampler, EpochsDiffer) {
  const auto made = make_dataset({100, 50, 70, 200});
  const Sampler sampler(made->dataset, {.context = 8, .seed = 1});
  const auto epoch = [&](std::uint64_t e) {
    std::vector<std::uint64_t> starts;
    for (std::uint64_t i = 0; i < sampler.samples_per_epoch(); ++i)
      starts.push_back(sampler.first_token(e * sampler.samples_per_epoch() + i));
    return starts;
  };
  std::set<std::vector<std::uint64_t>> orders;
  std::set<std::uint64_t> phases;
  for (std::uint64_t e = 0; e < 8; ++e) {
    orders.insert(epoch(e));
    phases.insert(epoch(e)[0] % 8);
  }
  EXPECT_EQ(orders.size(), 8U);
  EXPECT_GT(phases.size(), 1U);  // cut differently, not only in another order
  EXPECT_EQ(sampler.epoch_of(sampler.samples_per_epoch()), 1U);
}

TEST(Sampler, Refuses) {
  const auto made = make_dataset({5});
  EXPECT_THROW(Sampler(made->dataset, {.context = 0}), ValueError);
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { Sampler(made->dataset, {.context = 6}); }), "model.context"));
  const Sampler sampler(made->dataset, {.context = 5});
  Batch batch;
  EXPECT_THROW(sampler.fill(0, 0, batch), ValueError);
}

TEST(SampleShare, RanksInOrderMakeUpTheRound) {
  std::uint64_t next = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const SampleShare share = sample_share(12, rank, 3);
    EXPECT_EQ(share.offset, next);
    EXPECT_EQ(share.samples, 4);
    next += 4;
  }
  EXPECT_THROW((void)sample_share(10, 0, 3), ValueError);
  EXPECT_THROW((void)sample_share(9, 3, 3), ValueError);
  EXPECT_THROW((void)sample_share(9, -1, 3), ValueError);
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK
RC_GTEST_PROP(KeyedPermutationProperty, IsAPermutation, (std::uint64_t seed, std::uint64_t stream)) {
  RC_ASSERT(
      is_permutation_of_range(KeyedPermutation(*rc::gen::inRange<std::uint64_t>(1, 5000), seed, stream)));
}

// For any documents, an epoch consists of windows that do not overlap, with the right tokens, targets and
// documents.
RC_GTEST_PROP(SamplerProperty, AnEpochIsEveryWindowOnce, (std::uint64_t seed)) {
  const auto lengths =
      *rc::gen::container<std::vector<int>>(*rc::gen::inRange(1, 8), rc::gen::inRange(0, 40));
  const auto made = make_dataset(lengths);
  const std::uint64_t size = made->tokens.size();
  RC_PRE(size >= 2U);
  const auto context = *rc::gen::inRange<std::int64_t>(1, static_cast<std::int64_t>(size));
  const Sampler sampler(made->dataset, {.context = context, .seed = seed});
  const std::uint64_t epoch = *rc::gen::inRange<std::uint64_t>(0, 3);
  std::vector<int> covered(size, 0);
  const Batch batch = batch_of(sampler, epoch * sampler.samples_per_epoch(),
                               static_cast<std::int64_t>(sampler.samples_per_epoch()));
  for (std::uint64_t s = 0; s < sampler.samples_per_epoch(); ++s) {
    const std::uint64_t first = sampler.first_token(epoch * sampler.samples_per_epoch() + s);
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(context); ++i) {
      const std::size_t at = (first + i) % size;
      const std::size_t next = (at + 1) % size;
      const std::size_t place = s * static_cast<std::uint64_t>(context) + i;
      ++covered[at];
      RC_ASSERT(batch.tokens[place] == made->tokens[at]);
      RC_ASSERT(batch.documents[place] % static_cast<std::int64_t>(lengths.size()) == made->documents[at]);
      const bool same = next != 0 && made->documents[at] == made->documents[next];
      RC_ASSERT(batch.targets[place] == (same ? made->tokens[next] : kIgnored));
    }
  }
  RC_ASSERT(*std::max_element(covered.begin(), covered.end()) == 1);
  RC_ASSERT(static_cast<std::uint64_t>(std::count(covered.begin(), covered.end(), 1)) ==
            sampler.samples_per_epoch() * static_cast<std::uint64_t>(context));
}

// Sample k is the same however a run is divided into steps and ranks.
RC_GTEST_PROP(SamplerProperty, SamplesDoNotDependOnTheLayout, (std::uint64_t seed)) {
  const auto made = make_dataset({30, 7, 0, 55, 12});
  const Sampler sampler(made->dataset, {.context = 6, .seed = seed});
  const std::int64_t total = 24 * *rc::gen::inRange<std::int64_t>(1, 3);
  const std::uint64_t start = *rc::gen::inRange<std::uint64_t>(0, 100);
  const Batch whole = batch_of(sampler, start, total);
  std::vector<std::int64_t> joined;
  std::uint64_t position = start;
  while (joined.size() < whole.targets.size()) {
    // Another batch size and another dp in every step, as after a change of layout.
    const int dp = *rc::gen::element(1, 2, 3, 4);
    const std::int64_t round = dp * *rc::gen::inRange<std::int64_t>(1, 4);
    for (int rank = 0; rank < dp; ++rank) {
      const SampleShare share = sample_share(round, rank, dp);
      const Batch part = batch_of(sampler, position + share.offset, share.samples);
      joined.insert(joined.end(), part.targets.begin(), part.targets.end());
    }
    position += static_cast<std::uint64_t>(round);
  }
  joined.resize(whole.targets.size());
  RC_ASSERT(joined == whole.targets);
}
#endif

}  // namespace sampler_test
}  // namespace penstock::train
