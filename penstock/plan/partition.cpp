#include "penstock/plan/partition.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "penstock/base/errors.h"

namespace penstock::plan {
namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();

void check_counts(int layers, int stages, int most) {
  if (stages < 1) throw ValueError(describe("partition: stages", fmt::format("{}", stages), "at least 1"));
  if (stages > most)
    throw ValueError(describe("partition: stages", fmt::format("{}", stages), fmt::format("at most {} for {} layers", most, layers),
                              "use fewer stages or more layers"));
}

double cost_between(const std::vector<double>& sums, int begin, int end) {
  return sums[static_cast<std::size_t>(end)] - sums[static_cast<std::size_t>(begin)];
}

// Costs in units of their mean: equal ones become exactly 1, so that even splits tie exactly, whatever the unit was.
struct Scaled {
  std::vector<double> sums;  // of the first i layers
  double first = 0, last = 0;
};

Scaled scaled(const std::vector<double>& costs, const PartitionEnds& ends) {
  const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
  const double mean = total > 0 ? total / static_cast<double>(costs.size()) : 1;
  Scaled result{{0}, ends.first / mean, ends.last / mean};
  const bool equal = std::adjacent_find(costs.begin(), costs.end(), std::not_equal_to<>()) == costs.end();
  // Layers that cost nothing at all are split by their number.
  for (const double cost : costs) result.sums.push_back(result.sums.back() + (equal ? 1.0 : cost / mean));
  return result;
}

// Best splits of the layers from each one on, for each number of stages left. `add` says how the cost of one stage and of those behind
// it make up the whole; a stage for which it is impossible is not made.
template <class Add>
std::vector<LayerRange> best_split(const Scaled& costs, int layers, int stages, bool empty_first, bool empty_last, double* best, Add add) {
  const std::size_t width = static_cast<std::size_t>(layers) + 1;
  std::vector<std::vector<double>> value(static_cast<std::size_t>(stages), std::vector<double>(width, kImpossible));
  std::vector<std::vector<int>> cut(static_cast<std::size_t>(stages), std::vector<int>(width, 0));
  for (int stage = stages - 1; stage >= 0; --stage) {
    const bool may_be_empty = (stage == 0 && empty_first) || (stage == stages - 1 && empty_last);
    const double extra = (stage == 0 ? costs.first : 0) + (stage == stages - 1 ? costs.last : 0);
    for (int begin = 0; begin <= layers; ++begin) {
      double& mine = value[static_cast<std::size_t>(stage)][static_cast<std::size_t>(begin)];
      // The longest first: only what is better replaces it.
      const int shortest = stage == stages - 1 ? layers : begin + (may_be_empty ? 0 : 1);
      if (stage == stages - 1 && begin == layers && !may_be_empty) continue;
      for (int end = layers; end >= shortest; --end) {
        const double behind = stage == stages - 1 ? 0 : value[static_cast<std::size_t>(stage) + 1][static_cast<std::size_t>(end)];
        const double whole = add(cost_between(costs.sums, begin, end) + extra, behind);
        if (whole < mine) {
          mine = whole;
          cut[static_cast<std::size_t>(stage)][static_cast<std::size_t>(begin)] = end;
        }
      }
    }
  }
  if (best != nullptr) *best = value[0][0];
  std::vector<LayerRange> parts;
  int begin = 0;
  for (int stage = 0; stage < stages; ++stage) {
    const int end = cut[static_cast<std::size_t>(stage)][static_cast<std::size_t>(begin)];
    parts.push_back({begin, end});
    begin = end;
  }
  return parts;
}

void check_cost(double cost, const std::string& what) {
  if (!(cost >= 0) || std::isinf(cost)) throw ValueError(describe("partition: cost of " + what, fmt::format("{}", cost), "a number from 0 on"));
}

}  // namespace

std::vector<LayerRange> partition_by_count(int layers, int stages) {
  check_counts(layers, stages, layers);
  std::vector<LayerRange> parts;
  int begin = 0;
  for (int stage = 0; stage < stages; ++stage) {
    const int end = begin + layers / stages + (stage < layers % stages ? 1 : 0);
    parts.push_back({begin, end});
    begin = end;
  }
  return parts;
}

std::vector<LayerRange> partition_at(int layers, const std::vector<int>& boundaries) {
  if (layers < 1) throw ValueError(describe("partition: layers", fmt::format("{}", layers), "at least 1"));
  std::vector<LayerRange> parts;
  int begin = 0;
  for (const int boundary : boundaries) {
    if (boundary <= begin || boundary >= layers)
      throw ValueError(describe("partition: boundaries", fmt::format("{}", fmt::join(boundaries, " ")),
                                fmt::format("rising numbers from 1 to {}, where stages 1, 2, ... begin", layers - 1)));
    parts.push_back({begin, boundary});
    begin = boundary;
  }
  parts.push_back({begin, layers});
  return parts;
}

std::vector<LayerRange> partition_by_cost(const std::vector<double>& costs, int stages, const PartitionEnds& ends) {
  const int layers = static_cast<int>(costs.size());
  for (std::size_t i = 0; i < costs.size(); ++i) check_cost(costs[i], fmt::format("layer {}", i));
  check_cost(ends.first, "the first stage's own work");
  check_cost(ends.last, "the last stage's own work");
  const bool empty_first = ends.may_be_empty && ends.first > 0 && stages > 1, empty_last = ends.may_be_empty && ends.last > 0 && stages > 1;
  check_counts(layers, stages, layers + (empty_first ? 1 : 0) + (empty_last ? 1 : 0));
  const Scaled own = scaled(costs, ends);
  double least = 0;
  best_split(own, layers, stages, empty_first, empty_last, &least, [](double mine, double behind) { return std::max(mine, behind); });
  // Sums of the same layers from different ends round differently.
  const double limit = least * (1 + 1e-12);
  return best_split(own, layers, stages, empty_first, empty_last, nullptr,
                    [&](double mine, double behind) { return mine > limit ? kImpossible : mine * mine + behind; });
}

double heaviest(const std::vector<LayerRange>& parts, const std::vector<double>& costs, const PartitionEnds& ends) {
  double most = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    double cost = (i == 0 ? ends.first : 0) + (i + 1 == parts.size() ? ends.last : 0);
    for (int layer = parts[i].begin; layer < parts[i].end; ++layer) cost += costs[static_cast<std::size_t>(layer)];
    most = std::max(most, cost);
  }
  return most;
}

}  // namespace penstock::plan
