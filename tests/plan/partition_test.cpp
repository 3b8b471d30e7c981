#include "penstock/plan/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "penstock/base/errors.h"
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

// By trying every split.
double least_heaviest(const std::vector<double>& costs, std::size_t begin, int stages, double first, const PartitionEnds& ends, bool may_be_empty) {
  if (stages == 1) {
    if (begin == costs.size() && !(ends.may_be_empty && ends.last > 0)) return std::numeric_limits<double>::infinity();
    return std::accumulate(costs.begin() + static_cast<std::ptrdiff_t>(begin), costs.end(), first + ends.last);
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
  for (const std::vector<int>& bad : std::vector<std::vector<int>>{{0}, {5}, {-1}, {3, 2}, {2, 2}, {7}}) EXPECT_THROW(partition_at(5, bad), ValueError);
}

TEST(Partition, ByCostIsOptimalWhereGreedyIsNot) {
  EXPECT_EQ(sizes(partition_by_cost({10, 10, 10, 1}, 3)), (std::vector<int>{1, 1, 2}));
  EXPECT_EQ(heaviest(partition_by_cost({10, 10, 10, 1}, 3), {10, 10, 10, 1}), 11);
}

TEST(Partition, EqualCostsAreAsByCount) {
  for (int layers = 1; layers < 40; ++layers)
    for (int stages = 1; stages <= layers; ++stages)
      for (const double cost : {0.0, 1.0, 0.1, 12345.678}) {
        ASSERT_EQ(partition_by_cost(std::vector<double>(static_cast<std::size_t>(layers), cost), stages), partition_by_count(layers, stages))
            << layers << " layers, " << stages << " stages, cost " << cost;
      }
}

TEST(Partition, NoSplitIsBetter) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 400; ++trial) {
    const int layers = 1 + static_cast<int>(random() % 8), stages = 1 + static_cast<int>(random() % static_cast<unsigned>(layers));
    std::vector<double> costs;
    for (int i = 0; i < layers; ++i) costs.push_back(static_cast<double>(random() % 20) / 3);
    PartitionEnds ends;
    if (trial % 3 > 0) ends = {.first = static_cast<double>(random() % 30), .last = static_cast<double>(random() % 30), .may_be_empty = trial % 3 == 2};
    const auto parts = partition_by_cost(costs, stages, ends);
    expect_contiguous(parts, layers);
    EXPECT_EQ(parts.size(), static_cast<std::size_t>(stages));
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (!ends.may_be_empty || (i > 0 && i + 1 < parts.size())) {
        EXPECT_GE(parts[i].size(), 1);
      }
    const double best = least_heaviest(costs, 0, stages, ends.first, ends, ends.may_be_empty && ends.first > 0 && stages > 1);
    const bool all_equal = std::adjacent_find(costs.begin(), costs.end(), std::not_equal_to<>()) == costs.end();
    if (all_equal && costs[0] == 0) continue;  // split by number then
    EXPECT_NEAR(heaviest(parts, costs, ends), best, 1e-9 * (1 + best)) << "trial " << trial;
  }
}

TEST(Partition, AHeavyEndMayStandAlone) {
  const PartitionEnds head{.first = 0, .last = 6, .may_be_empty = true};
  EXPECT_EQ(sizes(partition_by_cost({1, 1, 1, 1, 1, 1}, 2, head)), (std::vector<int>{6, 0}));
  EXPECT_EQ(sizes(partition_by_cost({1, 1, 1, 1, 1, 1}, 2, {.first = 0, .last = 6})), (std::vector<int>{5, 1}));
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
