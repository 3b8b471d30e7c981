// Splits for ranks with several stages and limits of memory, compared with all splits there are.
#include "penstock/placed_partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::plan {
namespace placed_partition_test {

using penstock::test::has_text;
using penstock::test::message_of;
using schedule::StagePlacement;

constexpr double kNever = std::numeric_limits<double>::infinity();

int part_count(const PlacedLayers& layers) {
  return layers.placement == StagePlacement::Bidirectional ? layers.ranks : layers.stages;
}

double one_of(const std::vector<double>& values, int index) {
  return values.empty() ? 0 : values.size() == 1 ? values[0] : values[static_cast<std::size_t>(index)];
}

struct Loads {
  double slowest_rank = 0, slowest_stage = 0;
  std::vector<double> bytes;  // by rank
};

// From the definition, layer by layer.
Loads plain_loads(const PlacedLayers& layers, const std::vector<int>& cuts) {
  const std::vector<int> ranks =
      schedule::stage_to_rank(layers.placement, layers.ranks, layers.stages, schedule::PartialLeg::Allow);
  const int parts = part_count(layers);
  Loads loads;
  loads.bytes.assign(static_cast<std::size_t>(layers.ranks), 0);
  std::vector<double> times(static_cast<std::size_t>(layers.ranks), 0);
  for (int stage = 0; stage < layers.stages; ++stage) {
    const int part = stage % parts;
    const double held = one_of(layers.microbatches, stage);
    double time = (part == 0 ? layers.ends.first : 0) + (part == parts - 1 ? layers.ends.last : 0);
    double bytes = one_of(layers.stage_bytes, stage);
    if (part == 0) bytes += layers.first_bytes + held * layers.first_kept;
    if (part == parts - 1) bytes += layers.last_bytes + held * layers.last_kept;
    for (int layer = cuts[static_cast<std::size_t>(part)]; layer < cuts[static_cast<std::size_t>(part) + 1];
         ++layer) {
      time += layers.costs[static_cast<std::size_t>(layer)];
      if (!layers.bytes.empty()) bytes += layers.bytes[static_cast<std::size_t>(layer)];
      if (!layers.kept.empty()) bytes += held * layers.kept[static_cast<std::size_t>(layer)];
    }
    const auto rank = static_cast<std::size_t>(ranks[static_cast<std::size_t>(stage)]);
    times[rank] += time;
    loads.bytes[rank] += bytes;
    loads.slowest_stage = std::max(loads.slowest_stage, time);
  }
  loads.slowest_rank = *std::max_element(times.begin(), times.end());
  return loads;
}

void for_each_split(const PlacedLayers& layers, const std::function<void(const std::vector<int>&)>& visit) {
  const int parts = part_count(layers), count = static_cast<int>(layers.costs.size());
  std::vector<int> cuts{0};
  const std::function<void()> more = [&] {
    const int part = static_cast<int>(cuts.size()) - 1;
    const bool last = part == parts - 1;
    const bool empty = parts > 1 && layers.ends.may_be_empty &&
                       ((part == 0 && layers.ends.first > 0) || (last && layers.ends.last > 0));
    for (int end = last ? count : cuts.back(); end <= count; ++end) {
      if (end == cuts.back() && !empty) continue;
      cuts.push_back(end);
      last ? visit(cuts) : more();
      cuts.pop_back();
    }
  };
  more();
}

struct Best {
  double slowest = kNever;         // of splits within the limits
  double smallest_limit = kNever;  // the least fullest rank of all splits
};

Best best_of_all(const PlacedLayers& layers) {
  Best best;
  for_each_split(layers, [&](const std::vector<int>& cuts) {
    const Loads loads = plain_loads(layers, cuts);
    best.smallest_limit =
        std::min(best.smallest_limit, *std::max_element(loads.bytes.begin(), loads.bytes.end()));
    for (std::size_t rank = 0; rank < loads.bytes.size(); ++rank)
      if (!layers.limits.empty() &&
          loads.bytes[rank] > one_of(layers.limits, static_cast<int>(rank)) * (1 + 1e-12))
        return;
    best.slowest =
        std::min(best.slowest, layers.minimize == Slowest::Rank ? loads.slowest_rank : loads.slowest_stage);
  });
  return best;
}

// Small numbers, so that ties and exact fits are frequent.
class RandomLayers {
 public:
  explicit RandomLayers(unsigned seed) : random_(seed) {}

  PlacedLayers next() {
    PlacedLayers layers;
    const int kind = below(3);
    layers.placement = kind == 0   ? StagePlacement::Loop
                       : kind == 1 ? StagePlacement::V
                                   : StagePlacement::Bidirectional;
    layers.minimize = below(3) == 0 ? Slowest::Stage : Slowest::Rank;
    layers.ranks = 1 + below(4);
    const bool both = layers.placement == StagePlacement::Bidirectional;
    const int count = both ? layers.ranks + below(7 - layers.ranks + 3) : 1 + below(9);
    layers.stages = both ? 2 * layers.ranks : 1 + below(count);
    layers.costs = values(count, 9);
    if (below(3) > 0)
      layers.ends = {.first = static_cast<double>(below(6)),
                     .last = static_cast<double>(below(20)),
                     .may_be_empty = below(2) == 0};
    if (below(4) > 0) layers.bytes = values(count, 12);
    if (below(3) == 0) {
      layers.kept = values(count, 4);
      layers.first_kept = below(3);
      layers.last_kept = below(3);
      layers.microbatches = below(2) == 0 ? values(layers.stages, 4) : values(1, 4);
    }
    if (below(3) == 0) layers.stage_bytes = values(layers.stages, 5);
    layers.first_bytes = below(4);
    layers.last_bytes = below(4);
    return layers;
  }
  int below(int end) { return static_cast<int>(random_() % static_cast<unsigned>(std::max(1, end))); }
  std::vector<double> values(int count, int most) {
    std::vector<double> all;
    for (int i = 0; i < count; ++i) all.push_back(static_cast<double>(below(3 * most)) / 3);
    return all;
  }

 private:
  std::mt19937 random_;
};

std::vector<int> cuts_of(const std::vector<LayerRange>& parts) {
  std::vector<int> cuts{0};
  for (const LayerRange& part : parts) {
    EXPECT_EQ(part.begin, cuts.back());
    cuts.push_back(part.end);
  }
  return cuts;
}

TEST(PlacedPartition, NoSplitIsBetter) {
  RandomLayers random(11);
  int limited = 0, refused = 0, partial = 0;
  for (int trial = 0; trial < 1500; ++trial) {
    PlacedLayers layers = random.next();
    // Around the smallest limit, so that some are just enough and some just not.
    const double smallest = best_of_all(layers).smallest_limit;
    if (trial % 4 > 0) {
      const int ranks = trial % 4 == 3 ? layers.ranks : 1;
      for (int i = 0; i < ranks; ++i)
        layers.limits.push_back(std::max(0.0, smallest + random.below(9) / 3.0 - (trial % 8 > 3 ? 1 : 0)));
    }
    const Best best = best_of_all(layers);
    const std::string which = std::string(to_text(layers.placement)) + ", trial " + std::to_string(trial);
    if (best.slowest == kNever) {
      ++refused;
      EXPECT_THROW(partition_placed(layers), ValueError) << which;
      continue;
    }
    limited += layers.limits.empty() ? 0 : 1;
    partial += layers.stages % layers.ranks == 0 ? 0 : 1;
    const PlacedPartition found = partition_placed(layers);
    EXPECT_NEAR(found.loads.slowest, best.slowest, 1e-9) << which;
    EXPECT_TRUE(found.is_optimal()) << which;
    EXPECT_LE(found.lower_bound, best.slowest + 1e-9) << which;
    ASSERT_EQ(static_cast<int>(found.parts.size()), part_count(layers)) << which;
    const std::vector<int> cuts = cuts_of(found.parts);
    EXPECT_EQ(cuts.back(), static_cast<int>(layers.costs.size())) << which;
    const Loads loads = plain_loads(layers, cuts);
    for (int rank = 0; rank < layers.ranks; ++rank) {
      const double bytes = loads.bytes[static_cast<std::size_t>(rank)];
      EXPECT_NEAR(found.loads.rank_bytes[static_cast<std::size_t>(rank)], bytes, 1e-9) << which;
      if (!layers.limits.empty()) {
        EXPECT_LE(bytes, one_of(layers.limits, rank) + 1e-9) << which;
      }
    }
  }
  EXPECT_GT(limited, 300);
  EXPECT_GT(refused, 50);
  EXPECT_GT(partial, 200);
}

// By hand: rank 0 has stages 0 and 3, rank 1 has 1 and 2.
TEST(PlacedPartition, RanksOfAVAreBalancedByTheirSums) {
  PlacedLayers layers;
  layers.placement = StagePlacement::V;
  layers.ranks = 2;
  layers.stages = 4;
  layers.costs = {1, 1, 1, 1, 1, 7};
  const PlacedPartition found = partition_placed(layers);
  EXPECT_EQ(found.loads.slowest, 8);  // 7 and its partner; the slowest stage alone says nothing about it
  EXPECT_EQ(found.loads.rank_costs, (std::vector<double>{8, 4}));
  EXPECT_EQ(found.parts.front(), (LayerRange{0, 1}));
  layers.placement = StagePlacement::Loop;  // rank 1 has stages 1 and 3
  EXPECT_EQ(partition_placed(layers).loads.rank_costs, (std::vector<double>{4, 8}));
}

TEST(PlacedPartition, BothCopiesOfABidirectionalPipelineCount) {
  PlacedLayers layers;
  layers.placement = StagePlacement::Bidirectional;
  layers.ranks = 3;
  layers.stages = 6;
  layers.costs = {4, 1, 1, 1, 1, 4};
  // Rank 1 has the middle part twice, ranks 0 and 2 have both outer ones.
  const PlacedPartition found = partition_placed(layers);
  EXPECT_EQ(found.parts, (std::vector<LayerRange>{{0, 1}, {1, 5}, {5, 6}}));
  EXPECT_EQ(found.loads.rank_costs, (std::vector<double>{8, 8, 8}));
  EXPECT_EQ(found.loads.stage_costs, (std::vector<double>{4, 4, 4, 4, 4, 4}));
}

TEST(PlacedPartition, ALimitMovesTheCutOnlyWhereItMust) {
  PlacedLayers layers;
  layers.ranks = layers.stages = 2;
  layers.costs = {1, 1, 1, 1};
  layers.bytes = {5, 5, 1, 1};
  EXPECT_EQ(partition_placed(layers).parts[0], (LayerRange{0, 2}));
  layers.limits = {8};
  const PlacedPartition limited = partition_placed(layers);
  EXPECT_EQ(limited.parts[0], (LayerRange{0, 1}));
  EXPECT_EQ(limited.loads.rank_bytes, (std::vector<double>{5, 7}));
  EXPECT_EQ(limited.loads.slowest, 3);
}

TEST(PlacedPartition, WhatDoesNotFitIsNamed) {
  PlacedLayers layers;
  layers.ranks = layers.stages = 2;
  layers.costs = {1, 1, 1, 1};
  layers.bytes = {5, 5, 5, 9};
  layers.limits = {13};
  const std::string message = message_of<ValueError>([&] { partition_placed(layers); });
  EXPECT_TRUE(has_text(message, "got 13")) << message;
  EXPECT_TRUE(has_text(message, "at least 14, the smallest that allows a split")) << message;
  layers.limits = {14};
  EXPECT_EQ(partition_placed(layers).loads.rank_bytes, (std::vector<double>{10, 14}));
  layers.limits = {8};
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { partition_placed(layers); }),
                       "at least 9, which layer 3 alone needs"));
  layers.limits = {9, 14};
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { partition_placed(layers); }),
                       "equal limits of 14 for all ranks would be enough"));
}

TEST(PlacedPartition, BadInput) {
  PlacedLayers layers;
  layers.ranks = layers.stages = 2;
  layers.costs = {1, 1, 1};
  const auto message = [&](const std::function<void(PlacedLayers&)>& change) {
    PlacedLayers changed = layers;
    change(changed);
    return message_of<ValueError>([&] { partition_placed(changed); });
  };
  EXPECT_TRUE(has_text(message([](PlacedLayers& each) { each.bytes = {1}; }), "one for each of 3 layers"));
  EXPECT_TRUE(has_text(message([](PlacedLayers& each) { each.limits = {1, 2, 3}; }), "each of 2 ranks"));
  EXPECT_TRUE(has_text(message([](PlacedLayers& each) { each.microbatches = {1, 2, 3}; }), "2 stages"));
  EXPECT_TRUE(has_text(message([](PlacedLayers& each) { each.costs[1] = std::nan(""); }), "layer 1"));
  EXPECT_TRUE(has_text(message([](PlacedLayers& each) {
                         each.kept = {1, -1, 1};
                       }),
                       "kept memory of layer 1"));
  EXPECT_TRUE(has_text(message([](PlacedLayers& each) { each.last_bytes = -1; }), "last stage"));
  EXPECT_TRUE(has_text(message([](PlacedLayers& each) { each.stages = 4; }), "at most 3 stages"));
  EXPECT_TRUE(has_text(message([](PlacedLayers& each) { each.ranks = 0; }), "at least 1"));
  EXPECT_TRUE(
      has_text(message([](PlacedLayers& each) { each.placement = StagePlacement::Bidirectional; }), "4"));
  EXPECT_THROW(placed_loads(layers, {{0, 1}, {2, 3}}), ValueError);
  EXPECT_THROW(placed_loads(layers, {{0, 3}}), ValueError);
  EXPECT_EQ(placed_loads(layers, {{0, 1}, {1, 3}}).rank_costs, (std::vector<double>{1, 2}));
}

// A search that ends early says so, and its bound is still right.
TEST(PlacedPartition, AnUnfinishedSearchSaysHowMuchBetterASplitCouldBe) {
  PlacedLayers layers;
  layers.ranks = 3;
  layers.stages = 6;
  std::mt19937 random(5);
  for (int i = 0; i < 14; ++i) layers.costs.push_back(1 + static_cast<double>(random() % 1000) / 7);
  const PlacedPartition best = partition_placed(layers);
  ASSERT_TRUE(best.is_optimal());
  layers.max_states = 20;
  const PlacedPartition early = partition_placed(layers);
  EXPECT_FALSE(early.is_optimal());
  EXPECT_GE(early.loads.slowest, best.loads.slowest);
  EXPECT_LE(early.lower_bound, best.loads.slowest);
}

}  // namespace placed_partition_test
}  // namespace penstock::plan
