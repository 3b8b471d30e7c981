#include "penstock/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::plan {
namespace partition_test {

using penstock::test::has_text;
using penstock::test::message_of;

std::vector<int> sizes(const std::vector<LayerRange>& parts) {
  std::vector<int> all;
  for (const LayerRange& part : parts) all.push_back(part.size());
  return all;
}

void expect_contiguous(const std::vector<LayerRange>& parts, int layers) {
  int at = 0;
  for (const LayerRange& part : parts) {
    EXPECT_EQ(part.begin, at);
    EXPECT_GE(part.end, part.begin);
    at = part.end;
  }
  EXPECT_EQ(at, layers);
}

// By exhaustive search.
double least_heaviest(const std::vector<double>& costs, std::size_t begin, int stages, double first,
                      const PartitionEnds& ends, bool may_be_empty) {
  if (stages == 1) {
    if (begin == costs.size() && !(ends.may_be_empty && ends.last > 0))
      return std::numeric_limits<double>::infinity();
    return std::accumulate(costs.begin() + static_cast<std::ptrdiff_t>(begin), costs.end(),
                           first + ends.last);
  }
  double best = std::numeric_limits<double>::infinity(), mine = first;
  for (std::size_t end = begin; end <= costs.size(); ++end) {
    if (end > begin) mine += costs[end - 1];
    if (end == begin && !may_be_empty) continue;
    best = std::min(best, std::max(mine, least_heaviest(costs, end, stages - 1, 0, ends, false)));
  }
  return best;
}

TEST(Partition, ByCount) {
  EXPECT_EQ(sizes(partition_by_count(10, 4)), (std::vector<int>{3, 3, 2, 2}));
  EXPECT_EQ(sizes(partition_by_count(4, 4)), (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(sizes(partition_by_count(5, 1)), (std::vector<int>{5}));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { partition_by_count(3, 4); }), "at most 3"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { partition_by_count(3, 0); }), "at least 1"));
}

TEST(Partition, AtBoundaries) {
  EXPECT_EQ(partition_at(5, {2, 4}), (std::vector<LayerRange>{{0, 2}, {2, 4}, {4, 5}}));
  EXPECT_EQ(partition_at(5, {}), (std::vector<LayerRange>{{0, 5}}));
  for (const std::vector<int>& bad : std::vector<std::vector<int>>{{0}, {5}, {-1}, {3, 2}, {2, 2}, {7}})
    EXPECT_THROW(partition_at(5, bad), ValueError);
}

TEST(Partition, ByWeight) {
  // A stage ends once it has its share of what is left: 31/3, then 11/2.
  EXPECT_EQ(sizes(partition_by_weight({10, 10, 10, 1}, 3)), (std::vector<int>{2, 1, 1}));
  EXPECT_EQ(sizes(partition_by_weight({1, 1, 1, 9, 9, 9}, 3)), (std::vector<int>{4, 1, 1}));
  EXPECT_EQ(sizes(partition_by_weight({9, 1, 1, 9}, 2)), (std::vector<int>{2, 2}));
  // One layer is left for each later stage, however light the first ones are.
  EXPECT_EQ(sizes(partition_by_weight({0, 0, 0, 5}, 3)), (std::vector<int>{2, 1, 1}));
  EXPECT_EQ(sizes(partition_by_weight({3, 0, 0, 0}, 4)), (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(sizes(partition_by_weight({0, 0, 0, 0, 0}, 2)), (std::vector<int>{3, 2})) << "no weight at all";
  EXPECT_TRUE(has_text(message_of<ValueError>([] { partition_by_weight({1, 1}, 3); }), "at most 2"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { partition_by_weight({1, 1}, 0); }), "at least 1"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { partition_by_weight({1, -1}, 1); }), "layer 1"));
}

// The rule in other words: all that a stage could end at, and the first that reaches its share.
TEST(Partition, ByWeightFollowsItsRule) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 500; ++trial) {
    const int layers = 1 + static_cast<int>(random() % 20),
              stages = 1 + static_cast<int>(random() % static_cast<unsigned>(layers));
    std::vector<double> weights;
    for (int i = 0; i < layers; ++i) weights.push_back(static_cast<double>(random() % 50));
    const auto sum = [&](int begin, int end) {
      return std::accumulate(weights.begin() + begin, weights.begin() + end, 0.0);
    };
    const auto parts = partition_by_weight(weights, stages);
    expect_contiguous(parts, layers);
    ASSERT_EQ(static_cast<int>(parts.size()), stages);
    for (int stage = 0; stage + 1 < stages; ++stage) {
      const LayerRange part = parts[static_cast<std::size_t>(stage)];
      ASSERT_GE(part.size(), 1);
      const double share = sum(part.begin, layers) / (stages - stage);
      const bool at_last = part.end == layers - (stages - stage - 1);
      if (!at_last) {
        EXPECT_GE(sum(part.begin, part.end), share);
      }
      if (part.size() > 1) {
        EXPECT_LT(sum(part.begin, part.end - 1), share);
      }
    }
  }
  for (int layers = 1; layers < 80; ++layers)
    for (int stages = 1; stages <= layers; ++stages)
      for (const double weight : {7.0, 0.1})
        ASSERT_EQ(partition_by_weight(std::vector<double>(static_cast<std::size_t>(layers), weight), stages),
                  partition_by_count(layers, stages));
}

TEST(Partition, ByCostIsOptimalWhereGreedyIsNot) {
  EXPECT_EQ(sizes(partition_by_cost({10, 10, 10, 1}, 3)), (std::vector<int>{1, 1, 2}));
  EXPECT_EQ(heaviest(partition_by_cost({10, 10, 10, 1}, 3), {10, 10, 10, 1}), 11);
}

TEST(Partition, EqualCostsAreAsByCount) {
  for (int layers = 1; layers < 40; ++layers)
    for (int stages = 1; stages <= layers; ++stages)
      for (const double cost : {0.0, 1.0, 0.1, 12345.678}) {
        ASSERT_EQ(partition_by_cost(std::vector<double>(static_cast<std::size_t>(layers), cost), stages),
                  partition_by_count(layers, stages))
            << layers << " layers, " << stages << " stages, cost " << cost;
      }
}

TEST(Partition, NoSplitIsBetter) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 400; ++trial) {
    const int layers = 1 + static_cast<int>(random() % 8),
              stages = 1 + static_cast<int>(random() % static_cast<unsigned>(layers));
    std::vector<double> costs;
    for (int i = 0; i < layers; ++i) costs.push_back(static_cast<double>(random() % 20) / 3);
    PartitionEnds ends;
    if (trial % 3 > 0)
      ends = {.first = static_cast<double>(random() % 30),
              .last = static_cast<double>(random() % 30),
              .may_be_empty = trial % 3 == 2};
    const auto parts = partition_by_cost(costs, stages, ends);
    expect_contiguous(parts, layers);
    EXPECT_EQ(parts.size(), static_cast<std::size_t>(stages));
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (!ends.may_be_empty || (i > 0 && i + 1 < parts.size())) {
        EXPECT_GE(parts[i].size(), 1);
      }
    const double best =
        least_heaviest(costs, 0, stages, ends.first, ends, ends.may_be_empty && ends.first > 0 && stages > 1);
    const bool all_equal =
        std::adjacent_find(costs.begin(), costs.end(), std::not_equal_to<>()) == costs.end();
    if (all_equal && costs[0] == 0) continue;  // split by count
    EXPECT_NEAR(heaviest(parts, costs, ends), best, 1e-9 * (1 + best)) << "trial " << trial;
  }
}

// The same by dynamic programming over all splits, to check the choice among ties.
std::vector<LayerRange> by_all_splits(const std::vector<double>& costs, int stages,
                                      const PartitionEnds& ends) {
  const int layers = static_cast<int>(costs.size());
  const bool empty_first = ends.may_be_empty && ends.first > 0 && stages > 1,
             empty_last = ends.may_be_empty && ends.last > 0 && stages > 1;
  const double mean = std::accumulate(costs.begin(), costs.end(), 0.0) / layers;
  const bool equal = std::adjacent_find(costs.begin(), costs.end(), std::not_equal_to<>()) == costs.end();
  std::vector<double> sums{0};
  for (const double cost : costs) sums.push_back(sums.back() + (equal ? 1.0 : cost / mean));
  const double unit = mean > 0 ? mean : 1;
  const auto solve = [&](auto add) {
    std::vector<std::vector<double>> value(
        static_cast<std::size_t>(stages),
        std::vector<double>(sums.size(), std::numeric_limits<double>::infinity()));
    std::vector<std::vector<int>> cut(static_cast<std::size_t>(stages), std::vector<int>(sums.size(), 0));
    for (int stage = stages - 1; stage >= 0; --stage)
      for (int begin = 0; begin <= layers; ++begin) {
        const bool last = stage == stages - 1,
                   may_be_empty = (stage == 0 && empty_first) || (last && empty_last);
        if (last && begin == layers && !may_be_empty) continue;
        const auto s = static_cast<std::size_t>(stage), b = static_cast<std::size_t>(begin);
        for (int end = layers; end >= (last ? layers : begin + (may_be_empty ? 0 : 1)); --end) {
          const auto e = static_cast<std::size_t>(end);
          const double mine =
              sums[e] - sums[b] + ((stage == 0 ? ends.first / unit : 0) + (last ? ends.last / unit : 0));
          const double whole = add(mine, last ? 0 : value[s + 1][e]);
          if (whole < value[s][b]) {
            value[s][b] = whole;
            cut[s][b] = end;
          }
        }
      }
    std::vector<LayerRange> parts;
    for (int stage = 0, begin = 0; stage < stages; ++stage) {
      parts.push_back({begin, cut[static_cast<std::size_t>(stage)][static_cast<std::size_t>(begin)]});
      begin = parts.back().end;
    }
    return std::pair{value[0][0], parts};
  };
  const double limit =
      solve([](double mine, double behind) { return std::max(mine, behind); }).first * (1 + 1e-12);
  return solve([&](double mine, double behind) {
           return mine > limit ? std::numeric_limits<double>::infinity() : mine * mine + behind;
         })
      .second;
}

double squares(const std::vector<LayerRange>& parts, const std::vector<double>& costs,
               const PartitionEnds& ends) {
  double sum = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    double cost = (i == 0 ? ends.first : 0) + (i + 1 == parts.size() ? ends.last : 0);
    for (int layer = parts[i].begin; layer < parts[i].end; ++layer)
      cost += costs[static_cast<std::size_t>(layer)];
    sum += cost * cost;
  }
  return sum;
}

TEST(PartitionProperty, MatchesAllSplits) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 2000; ++trial) {
    const int layers = 1 + static_cast<int>(random() % 24);
    PartitionEnds ends;
    if (trial % 3 > 0)
      ends = {.first = static_cast<double>(random() % 30) / 7,
              .last = static_cast<double>(random() % 90) / 7,
              .may_be_empty = trial % 3 == 2};
    const int most =
        layers + (ends.may_be_empty && ends.first > 0 ? 1 : 0) + (ends.may_be_empty && ends.last > 0 ? 1 : 0);
    const int stages = 1 + static_cast<int>(random() % static_cast<unsigned>(layers == 1 ? 1 : most));
    std::vector<double> costs;
    const unsigned kinds = 1 + random() % 8;
    for (int i = 0; i < layers; ++i)
      costs.push_back(static_cast<double>(random() % kinds + (kinds == 1 ? 1 : 0)) / 3);
    if (std::accumulate(costs.begin(), costs.end(), 0.0) == 0) continue;
    const auto parts = partition_by_cost(costs, stages, ends), expected = by_all_splits(costs, stages, ends);
    const std::string which = "trial " + std::to_string(trial) + ": " + std::to_string(layers) + " layers, " +
                              std::to_string(stages) + " stages";
    expect_contiguous(parts, layers);
    ASSERT_EQ(parts.size(), expected.size()) << which;
    EXPECT_NEAR(heaviest(parts, costs, ends), heaviest(expected, costs, ends), 1e-9) << which;
    EXPECT_NEAR(squares(parts, costs, ends), squares(expected, costs, ends), 1e-9) << which;
    // Sums of other costs are equal up to rounding, which depends on the compiler.
    if (kinds == 1 && ends.first == 0 && ends.last == 0) {
      EXPECT_EQ(parts, expected) << which;
    }
  }
}

// Thousands of layers over hundreds of stages once took seconds, and more layers minutes.
TEST(Partition, ManyLayersAreFast) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<double> costs(20000, 1.0);
  EXPECT_EQ(partition_by_cost(costs, 1000), partition_by_count(20000, 1000));
  const auto parts = partition_by_cost(std::vector<double>(4000, 1.0), 1000,
                                       {.first = 0.5, .last = 9, .may_be_empty = true});
  expect_contiguous(parts, 4000);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(Partition, AHeavyEndMayStandAlone) {
  const PartitionEnds head{.first = 0, .last = 6, .may_be_empty = true};
  EXPECT_EQ(sizes(partition_by_cost({1, 1, 1, 1, 1, 1}, 2, head)), (std::vector<int>{6, 0}));
  EXPECT_EQ(sizes(partition_by_cost({1, 1, 1, 1, 1, 1}, 2, {.first = 0, .last = 6})),
            (std::vector<int>{5, 1}));
  // One stage more than layers is possible then.
  EXPECT_EQ(sizes(partition_by_cost({1, 1}, 3, head)), (std::vector<int>{1, 1, 0}));
  EXPECT_THROW(partition_by_cost({1, 1}, 4, head), ValueError);
}

TEST(Partition, BadCosts) {
  EXPECT_TRUE(has_text(message_of<ValueError>([] { partition_by_cost({1, -1}, 1); }), "layer 1"));
  EXPECT_THROW(partition_by_cost({1, std::nan("")}, 1), ValueError);
  EXPECT_THROW(partition_by_cost({1, std::numeric_limits<double>::infinity()}, 1), ValueError);
  EXPECT_THROW(partition_by_cost({1}, 1, {.first = -1}), ValueError);
  EXPECT_THROW(partition_by_cost({}, 1), ValueError);
}

}  // namespace partition_test
}  // namespace penstock::plan
