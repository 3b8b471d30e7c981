#include "penstock/dtensor/plan/redistribute_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"

namespace penstock {
namespace redistribute_plan_test {

using Shape = std::vector<std::int64_t>;

// Every set of placements without Partial that a tensor of `dims` dims can have on a mesh, each order of
// splits once.
std::vector<Placements> all_placements(const Shape& mesh, std::int64_t dims) {
  std::vector<Placements> result{{}};
  for (std::size_t axis = 0; axis < mesh.size(); ++axis) {
    std::vector<Placements> longer;
    for (const Placements& start : result) {
      std::vector<Placement> choices{Replicate{}};
      for (std::int64_t dim = 0; dim < dims; ++dim) {
        choices.push_back(Shard{dim});
        std::int64_t factor = 1;
        for (std::size_t right = axis + 1; right < mesh.size(); ++right)
          choices.push_back(StridedShard{dim, factor *= mesh[right]});
      }
      for (const Placement& choice : choices) {
        longer.push_back(start);
        longer.back().push_back(choice);
      }
    }
    result = std::move(longer);
  }
  // A strided shard is meaningful if the axes to its right split the same dim that many times.
  std::erase_if(result, [&](const Placements& placements) {
    for (std::size_t axis = 0; axis < placements.size(); ++axis) {
      if (!placements[axis].is_strided_shard()) continue;
      std::int64_t pieces = 1;
      for (std::size_t right = axis + 1; right < placements.size(); ++right)
        if (placements[right].splits(placements[axis].dim())) pieces *= mesh[right];
      if (pieces != placements[axis].split_factor()) return true;
    }
    return false;
  });
  return result;
}

// Single steps priced by the planner, combined by Floyd-Warshall: no plan may cost more than the cheapest
// walk.
void expect_optimal(const Shape& mesh, const Shape& shape) {
  const TensorSize tensor{shape, 4};
  const auto states = all_placements(mesh, static_cast<std::int64_t>(shape.size()));
  const std::size_t n = states.size();
  std::vector<std::vector<double>> distance(n,
                                            std::vector<double>(n, std::numeric_limits<double>::infinity()));
  std::vector<std::vector<double>> planned = distance;
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j) {
      const RedistributePlan plan = plan_redistribute(tensor, mesh, states[i], states[j]);
      planned[i][j] = plan.seconds;
      if (plan.steps.size() <= 1) distance[i][j] = plan.seconds;
    }
  for (std::size_t k = 0; k < n; ++k)
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < n; ++j)
        distance[i][j] = std::min(distance[i][j], distance[i][k] + distance[k][j]);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j)
      ASSERT_NEAR(planned[i][j], distance[i][j], 1e-12)
          << to_string(states[i]) << " -> " << to_string(states[j]);
}

TEST(RedistributePlan, IsTheCheapestWalk) {
  expect_optimal({2}, {8, 6});
  expect_optimal({2, 2}, {8, 6});
  expect_optimal({2, 3}, {7, 5});
  expect_optimal({3, 2}, {64, 128});
  expect_optimal({2, 2, 2}, {16, 16});
}

std::set<std::int64_t> held(const Shape& shape, const Shape& mesh, const Shape& coordinate,
                            const Placements& placements) {
  std::set<std::int64_t> result;
  for (const ShardBox& box : local_boxes(shape, mesh, coordinate, placements))
    for (std::int64_t i = 0; i < box.shape[0]; ++i)
      for (std::int64_t j = 0; j < box.shape[1]; ++j)
        result.insert((box.offset[0] + i) * shape[1] + box.offset[1] + j);
  return result;
}

std::vector<Shape> coordinates(const Shape& mesh) {
  std::vector<Shape> result{{}};
  for (const std::int64_t size : mesh) {
    std::vector<Shape> longer;
    for (const Shape& start : result)
      for (std::int64_t i = 0; i < size; ++i) {
        longer.push_back(start);
        longer.back().push_back(i);
      }
    result = longer;
  }
  return result;
}

// What a rank holds after a step must come from the ranks along its axis.
void expect_sound(const Shape& mesh, const Shape& shape) {
  const auto states = all_placements(mesh, 2);
  for (const Placements& from : states)
    for (const Placements& to : states) {
      const RedistributePlan plan = plan_redistribute({shape, 4}, mesh, from, to);
      ASSERT_TRUE(plan.steps.empty() ? from == to
                                     : plan.steps.front().before == from && plan.steps.back().after == to);
      for (const RedistributeStep& step : plan.steps)
        for (const Shape& coordinate : coordinates(mesh)) {
          std::set<std::int64_t> available;
          Shape other = coordinate;
          for (std::int64_t i = 0; i < mesh[static_cast<std::size_t>(step.axis)]; ++i) {
            other[static_cast<std::size_t>(step.axis)] = i;
            const auto part = held(shape, mesh, other, step.before);
            available.insert(part.begin(), part.end());
          }
          const auto own = held(shape, mesh, coordinate, step.before),
                     wanted = held(shape, mesh, coordinate, step.after);
          if (step.kind == RedistributeKind::Slice) available = own;
          ASSERT_TRUE(step.kind != RedistributeKind::AllGather || wanted == available) << plan.to_string();
          ASSERT_TRUE(std::includes(available.begin(), available.end(), wanted.begin(), wanted.end()))
              << to_string(from) << " -> " << to_string(to) << "\n"
              << plan.to_string();
        }
    }
}

TEST(RedistributePlan, EveryStepUsesTheAxisItNames) {
  expect_sound({2}, {5, 3});
  expect_sound({2, 2}, {7, 5});
  expect_sound({2, 3}, {7, 4});
  expect_sound({2, 2, 2}, {9, 8});
}

TEST(RedistributePlan, PicksTheCollective) {
  const TensorSize tensor{{1024, 1024}, 4};
  const auto kinds = [&](const Shape& mesh, const Placements& from, const Placements& to) {
    std::string text;
    for (const RedistributeStep& step : plan_redistribute(tensor, mesh, from, to).steps)
      text += std::string(to_text(step.kind)) + " ";
    return text;
  };
  EXPECT_EQ(kinds({4}, {Replicate{}}, {Shard{0}}), "slice ");
  EXPECT_EQ(kinds({4}, {Shard{0}}, {Replicate{}}), "all_gather ");
  EXPECT_EQ(kinds({4}, {Shard{0}}, {Shard{1}}), "all_to_all ");
  EXPECT_EQ(kinds({4}, {Partial{}}, {Replicate{}}), "all_reduce ");
  EXPECT_EQ(kinds({4}, {Partial{}}, {Shard{1}}), "reduce_scatter ");
  EXPECT_EQ(kinds({4}, {Shard{1}}, {Partial{}}), "embed ");
  EXPECT_EQ(kinds({4}, {Shard{1}}, {Shard{1}}), "");
  EXPECT_EQ(kinds({2, 4}, {Partial{}, Replicate{}}, {Shard{0}, Shard{1}}), "slice reduce_scatter ");
  EXPECT_EQ(kinds({2, 2}, {Shard{0}, Shard{0}}, {Replicate{}, Replicate{}}), "all_gather all_gather ");
  // Tensor parallel first, then data parallel: the strided order is undone from its own end.
  EXPECT_EQ(kinds({2, 2}, {StridedShard{0, 2}, Shard{0}}, {Replicate{}, Shard{0}}), "all_gather ");
}

TEST(RedistributePlan, CountsTheBytesOfARing) {
  const TensorSize tensor{{8, 4}, 4};  // 128 bytes
  const auto bytes = [&](const Placements& from, const Placements& to) {
    return plan_redistribute(tensor, {4}, from, to).bytes;
  };
  EXPECT_EQ(bytes({Shard{0}}, {Replicate{}}), 3 * 32);
  EXPECT_EQ(bytes({Partial{}}, {Shard{0}}), 3 * 32);
  EXPECT_EQ(bytes({Partial{}}, {Replicate{}}), 2 * 3 * 32);
  EXPECT_EQ(bytes({Shard{0}}, {Shard{1}}), 3 * 8);
  EXPECT_EQ(bytes({Replicate{}}, {Shard{1}}), 0);
}

TEST(RedistributePlan, RefusesToCreatePartialValues) {
  const TensorSize tensor{{4, 4}, 4};
  EXPECT_THROW(plan_redistribute(tensor, {2}, {Replicate{}}, {Partial{}}), ValueError);
  EXPECT_THROW(plan_redistribute(tensor, {2}, {Partial{PartialOp::Max}}, {Partial{}}), ValueError);
  EXPECT_THROW(plan_redistribute(tensor, {2}, {Shard{0}}, {Partial{PartialOp::Avg}}), ValueError);
  EXPECT_TRUE(
      plan_redistribute(tensor, {2}, {Partial{PartialOp::Max}}, {Partial{PartialOp::Max}}).steps.empty());
  EXPECT_THROW(plan_redistribute(tensor, {2}, {Shard{2}}, {Replicate{}}), ValueError);
  EXPECT_THROW(plan_redistribute(tensor, {2, 2}, {Shard{0}}, {Replicate{}}), ValueError);
}

}  // namespace redistribute_plan_test
}  // namespace penstock
