#include "penstock/partition.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::plan {
namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();

void check_counts(int layers, int stages, int most) {
  if (stages < 1) throw ValueError(describe("partition: stages", fmt::format("{}", stages), "at least 1"));
  if (stages > most)
    throw ValueError(describe("partition: stages", fmt::format("{}", stages),
                              fmt::format("at most {} for {} layers", most, layers),
                              "use fewer stages or more layers"));
}

double cost_between(const std::vector<double>& sums, int begin, int end) {
  return sums[static_cast<std::size_t>(end)] - sums[static_cast<std::size_t>(begin)];
}

bool all_equal(const std::vector<double>& values) {
  return std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end();
}

// Costs divided by their mean: equal costs become exactly 1, so that even splits tie exactly in any unit.
struct Scaled {
  std::vector<double> sums;  // of the first i layers
  double first = 0, last = 0;
};

Scaled scaled(const std::vector<double>& costs, const PartitionEnds& ends) {
  const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
  const double mean = total > 0 ? total / static_cast<double>(costs.size()) : 1;
  Scaled result{{0}, ends.first / mean, ends.last / mean};
  const bool equal = all_equal(costs);
  // If all layers cost nothing, they are split by count.
  for (const double cost : costs) result.sums.push_back(result.sums.back() + (equal ? 1.0 : cost / mean));
  return result;
}

// The splits whose stages all cost at most a limit.
class Splits {
 public:
  Splits(const Scaled& costs, int layers, int stages, bool empty_first, bool empty_last)
      : costs_(costs), layers_(layers), stages_(stages), empty_first_(empty_first), empty_last_(empty_last) {
    for (int layer = 0; layer < layers; ++layer)
      most_of_one_ = std::max(most_of_one_, cost_between(costs_.sums, layer, layer + 1));
  }

  // The smallest limit that allows a split: bisection down to adjacent doubles, so it is exactly the cost of
  // a stage.
  double least_limit() {
    double low = 0, high = costs_.sums.back() + costs_.first + costs_.last;
    while (true) {
      const double middle = low + (high - low) / 2;
      if (middle <= low || middle >= high) return high;
      (find_begins(middle) ? high : low) = middle;
    }
  }

  // The split with the least sum of squares.
  std::vector<LayerRange> most_even(double limit) {
    const bool possible = find_begins(limit);
    PENSTOCK_INVARIANT(possible, "the limit allows a split");
    // Least sums for the layers from each possible begin of a stage on: of this stage and of the one after
    // it.
    std::vector<double> value, after;
    std::vector<std::vector<int>> cut(static_cast<std::size_t>(stages_));
    for (int stage = stages_ - 1; stage >= 0; --stage) {
      const Begins& here = begins_[static_cast<std::size_t>(stage)];
      value.assign(static_cast<std::size_t>(here.high - here.low + 1), kImpossible);
      std::vector<int>& ends = cut[static_cast<std::size_t>(stage)];
      ends.assign(value.size(), layers_);
      for (int begin = here.low; begin <= here.high; ++begin) {
        const auto place = static_cast<std::size_t>(begin - here.low);
        if (stage == stages_ - 1) {
          const double mine = cost(stage, begin, layers_);
          value[place] = mine * mine;
          continue;
        }
        const Begins& next = begins_[static_cast<std::size_t>(stage) + 1];
        // Longest stage first: it is replaced only by a strictly better one.
        for (int end = std::min(next.high, farthest(stage, begin, limit));
             end >= std::max(next.low, begin + shortest(stage)); --end) {
          const double mine = cost(stage, begin, end);
          const double whole = mine * mine + after[static_cast<std::size_t>(end - next.low)];
          if (whole < value[place]) {
            value[place] = whole;
            ends[place] = end;
          }
        }
      }
      after.swap(value);
    }
    std::vector<LayerRange> parts;
    int begin = 0;
    for (int stage = 0; stage < stages_; ++stage) {
      const int end = cut[static_cast<std::size_t>(stage)]
                         [static_cast<std::size_t>(begin - begins_[static_cast<std::size_t>(stage)].low)];
      parts.push_back({begin, end});
      begin = end;
    }
    return parts;
  }

 private:
  // The layers that a stage can begin with: an inclusive range.
  struct Begins {
    int low = 0, high = 0;
  };

  int shortest(int stage) const {
    return (stage == 0 && empty_first_) || (stage == stages_ - 1 && empty_last_) ? 0 : 1;
  }
  double cost(int stage, int begin, int end) const {
    return cost_between(costs_.sums, begin, end) +
           ((stage == 0 ? costs_.first : 0) + (stage == stages_ - 1 ? costs_.last : 0));
  }
  // The largest end within the limit; below `begin` if there is none. Costs increase with the end.
  int farthest(int stage, int begin, double limit) const {
    int low = begin - 1, high = layers_;
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (cost(stage, begin, middle) <= limit) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  // The smallest begin within the limit; above `end` if there is none.
  int nearest(int stage, int end, double limit) const {
    int low = 0, high = end + 1;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (cost(stage, middle, end) <= limit) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  // Computes the begins of each stage that the stages before it can reach and from which the stages after it
  // can reach the end. They are contiguous: if every single layer is within the limit, every stage can end
  // one layer earlier or later. Returns false if the limit allows no split.
  bool find_begins(double limit) {
    begins_.assign(static_cast<std::size_t>(stages_), {});
    if (limit < most_of_one_) return false;
    const auto at = [&](int stage) -> Begins& { return begins_[static_cast<std::size_t>(stage)]; };
    const int last = stages_ - 1;
    at(last) = {nearest(last, layers_, limit), layers_ - shortest(last)};
    for (int stage = last - 1; stage >= 0; --stage) {
      const Begins next = at(stage + 1);
      if (next.low > next.high) return false;
      at(stage) = {nearest(stage, std::max(next.low, stage == 0 ? shortest(0) : 0), limit),
                   next.high - shortest(stage)};
    }
    if (at(0).low > 0 || at(0).high < 0) return false;
    at(0) = {0, 0};
    for (int stage = 0; stage < last; ++stage) {
      const Begins here = at(stage);
      Begins& next = at(stage + 1);
      next.low = std::max(next.low, here.low + shortest(stage));
      next.high = std::min(next.high, farthest(stage, here.high, limit));
      if (next.low > next.high) return false;
    }
    return true;
  }

  const Scaled& costs_;
  int layers_, stages_;
  bool empty_first_, empty_last_;
  double most_of_one_ = 0;
  std::vector<Begins> begins_;  // by stage
};

void check_cost(double cost, const std::string& what) {
  if (!(cost >= 0) || std::isinf(cost))
    throw ValueError(
        describe("partition: cost of " + what, fmt::format("{}", cost), "a finite number of at least 0"));
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
      throw ValueError(
          describe("partition: boundaries", fmt::format("{}", fmt::join(boundaries, " ")),
                   fmt::format("increasing numbers from 1 to {}, where stages 1, 2, ... begin", layers - 1)));
    parts.push_back({begin, boundary});
    begin = boundary;
  }
  parts.push_back({begin, layers});
  return parts;
}

std::vector<LayerRange> partition_by_weight(const std::vector<double>& weights, int stages) {
  const int layers = static_cast<int>(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) check_cost(weights[i], fmt::format("layer {}", i));
  check_counts(layers, stages, layers);
  if (all_equal(weights)) return partition_by_count(layers, stages);  // exactly, however sums round
  double remaining = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<LayerRange> parts;
  int begin = 0;
  for (int left = stages; left > 1; --left) {
    const double share = remaining / left;
    double own = weights[static_cast<std::size_t>(begin)];
    int end = begin + 1;
    while (end < layers - (left - 1) && own < share) own += weights[static_cast<std::size_t>(end++)];
    parts.push_back({begin, end});
    remaining -= own;
    begin = end;
  }
  parts.push_back({begin, layers});
  return parts;
}

std::vector<LayerRange> partition_by_cost(const std::vector<double>& costs, int stages,
                                          const PartitionEnds& ends) {
  const int layers = static_cast<int>(costs.size());
  for (std::size_t i = 0; i < costs.size(); ++i) check_cost(costs[i], fmt::format("layer {}", i));
  check_cost(ends.first, "the first stage's own work");
  check_cost(ends.last, "the last stage's own work");
  const bool empty_first = ends.may_be_empty && ends.first > 0 && stages > 1,
             empty_last = ends.may_be_empty && ends.last > 0 && stages > 1;
  check_counts(layers, stages, layers + (empty_first ? 1 : 0) + (empty_last ? 1 : 0));
  const Scaled own = scaled(costs, ends);
  Splits splits(own, layers, stages, empty_first, empty_last);
  // Summing the same layers in different orders rounds differently.
  return splits.most_even(splits.least_limit() * (1 + 1e-12));
}

double heaviest(const std::vector<LayerRange>& parts, const std::vector<double>& costs,
                const PartitionEnds& ends) {
  double most = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    double cost = (i == 0 ? ends.first : 0) + (i + 1 == parts.size() ? ends.last : 0);
    for (int layer = parts[i].begin; layer < parts[i].end; ++layer)
      cost += costs[static_cast<std::size_t>(layer)];
    most = std::max(most, cost);
  }
  return most;
}

}  // namespace penstock::plan
