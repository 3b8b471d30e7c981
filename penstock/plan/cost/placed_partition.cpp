#include "penstock/placed_partition.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/plan/cost/placed_search.h"

namespace penstock::plan {
namespace {

constexpr int kMostLayers = 65535;  // positions are remembered as 16-bit numbers

void require_value(double value, const std::string& what) {
  if (!(value >= 0) || std::isinf(value))
    throw ValueError(
        describe("partition: " + what, fmt::format("{}", value), "a finite number of at least 0"));
}

// One value for each of `count`; from one for each, one for all, or none.
std::vector<double> for_each_of(const std::vector<double>& values, std::size_t count, const char* what,
                                const char* each) {
  if (values.size() > 1 && values.size() != count)
    throw ValueError(describe(fmt::format("partition: {}", what), fmt::format("{} values", values.size()),
                              fmt::format("one for each of {} {}s, one for all, or none", count, each)));
  std::vector<double> all(count, values.size() == 1 ? values[0] : 0);
  if (values.size() > 1) all = values;
  for (std::size_t i = 0; i < count; ++i) require_value(all[i], fmt::format("{} of {} {}", what, each, i));
  return all;
}

// One value for each layer; from one for each, or none.
std::vector<double> sums_of(const std::vector<double>& values, std::size_t layers, const char* what) {
  if (!values.empty() && values.size() != layers)
    throw ValueError(describe(fmt::format("partition: {}", what), fmt::format("{} values", values.size()),
                              fmt::format("one for each of {} layers, or none", layers)));
  std::vector<double> sums{0};
  for (std::size_t i = 0; i < layers; ++i) {
    const double value = values.empty() ? 0 : values[i];
    require_value(value, fmt::format("{} of layer {}", what, i));
    sums.push_back(sums.back() + value);
  }
  return sums;
}

int part_count(const PlacedLayers& layers) {
  return layers.placement == schedule::StagePlacement::Bidirectional ? layers.ranks : layers.stages;
}

bool may_be_empty(const PlacedLayers& layers, double other_work) {
  return layers.ends.may_be_empty && other_work > 0 && part_count(layers) > 1;
}

// Checks everything but whether the limits allow a split.
SearchSpace space_of(const PlacedLayers& layers) {
  const std::size_t count = layers.costs.size();
  SearchSpace space;
  space.rank_stages =
      schedule::rank_to_stages(layers.placement, layers.ranks, layers.stages, schedule::PartialLeg::Allow);
  space.layers = static_cast<int>(count);
  space.parts = part_count(layers);
  space.by_stage = layers.minimize == Slowest::Stage;
  space.shortest.assign(static_cast<std::size_t>(space.parts), 1);
  if (may_be_empty(layers, layers.ends.first)) space.shortest.front() = 0;
  if (may_be_empty(layers, layers.ends.last)) space.shortest.back() = 0;
  const auto most = static_cast<int>(
      count + static_cast<std::size_t>(std::count(space.shortest.begin(), space.shortest.end(), 0)));
  if (count > kMostLayers || space.parts > most)
    throw ValueError(describe("partition: stages", fmt::format("{} for {} layers", space.parts, count),
                              fmt::format("at most {} layers, and at most {} stages", kMostLayers, most),
                              "use fewer stages or more layers"));
  const auto stages = static_cast<std::size_t>(layers.stages);
  space.time = {.sums = sums_of(layers.costs, count, "cost"),
                .scaled_sums = std::vector<double>(count + 1, 0),
                .factor = std::vector<double>(stages, 0),
                .fixed = std::vector<double>(stages, 0)};
  space.bytes = {.sums = sums_of(layers.bytes, count, "memory"),
                 .scaled_sums = sums_of(layers.kept, count, "kept memory"),
                 .factor = for_each_of(layers.microbatches, stages, "microbatches", "stage"),
                 .fixed = for_each_of(layers.stage_bytes, stages, "memory", "stage")};
  const auto add = [&](int part, double cost, double bytes, double kept, const char* which) {
    require_value(cost, fmt::format("cost of the {} stage's own work", which));
    require_value(bytes, fmt::format("memory of the {} stage's own work", which));
    require_value(kept, fmt::format("kept memory of the {} stage's own work", which));
    for (std::size_t stage = static_cast<std::size_t>(part); stage < stages;
         stage += static_cast<std::size_t>(space.parts)) {
      space.time.fixed[stage] += cost;
      space.bytes.fixed[stage] += bytes + space.bytes.factor[stage] * kept;
    }
  };
  add(0, layers.ends.first, layers.first_bytes, layers.first_kept, "first");
  add(space.parts - 1, layers.ends.last, layers.last_bytes, layers.last_kept, "last");
  if (!layers.limits.empty())
    space.limits = for_each_of(layers.limits, static_cast<std::size_t>(layers.ranks), "limit", "rank");
  return space;
}

PlacedLoads loads_of(const SearchSpace& space, const std::vector<LayerRange>& parts) {
  PlacedLoads loads;
  const std::size_t stages = space.time.fixed.size();
  for (std::size_t stage = 0; stage < stages; ++stage) {
    const LayerRange& part = parts[stage % parts.size()];
    loads.stage_costs.push_back(space.time.of(static_cast<int>(stage), part.begin, part.end));
    loads.stage_bytes.push_back(space.bytes.of(static_cast<int>(stage), part.begin, part.end));
  }
  for (const std::vector<int>& of_rank : space.rank_stages) {
    double cost = 0, bytes = 0;
    for (const int stage : of_rank) {
      cost += loads.stage_costs[static_cast<std::size_t>(stage)];
      bytes += loads.stage_bytes[static_cast<std::size_t>(stage)];
    }
    loads.rank_costs.push_back(cost);
    loads.rank_bytes.push_back(bytes);
  }
  const std::vector<double>& all = space.by_stage ? loads.stage_costs : loads.rank_costs;
  loads.slowest = *std::max_element(all.begin(), all.end());
  return loads;
}

bool within_limits(const SearchSpace& space, const PlacedLoads& loads) {
  for (std::size_t rank = 0; rank < space.limits.size(); ++rank)
    if (loads.rank_bytes[rank] > space.limits[rank] * (1 + 1e-12)) return false;
  return true;
}

std::vector<LayerRange> ranges_of(const std::vector<int>& cuts) {
  std::vector<LayerRange> parts;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) parts.push_back({cuts[i], cuts[i + 1]});
  return parts;
}

// Every rank takes its share, if time could be divided at will.
double even_share(const SearchSpace& space) {
  double all = 0, shares = 0;
  const double copies = static_cast<double>(space.time.fixed.size()) / space.parts;
  all = copies * space.time.sums.back();
  for (const double fixed : space.time.fixed) all += fixed;
  for (const std::vector<int>& of_rank : space.rank_stages)
    shares += space.by_stage ? static_cast<double>(of_rank.size()) : of_rank.empty() ? 0 : 1;
  return all / shares;
}

// The best split and a proof, or the best one that was found before the search was exhausted. Nothing: there
// is none. Throws ValueError if the search was exhausted before it found one.
std::optional<PlacedPartition> best_split(const SearchSpace& space, std::int64_t max_states) {
  PlacedSearch search(space, max_states);
  const auto first = search.find(std::numeric_limits<double>::infinity());
  if (!first && search.exhausted())
    throw ValueError(
        describe("partition: memory limits",
                 fmt::format("no split was found among {} partial ones, and there may be one", max_states),
                 "limits that allow many splits", "raise the limits or max_states"));
  if (!first) return std::nullopt;
  PlacedPartition best{.parts = ranges_of(*first), .loads = {}, .lower_bound = even_share(space)};
  best.loads = loads_of(space, best.parts);
  search.prepare(best.loads.slowest);
  double bound = best.lower_bound;  // often possible: a model of equal layers
  while (!best.is_optimal()) {
    if (const auto cuts = search.find(bound)) {
      best.parts = ranges_of(*cuts);
      best.loads = loads_of(space, best.parts);
    } else if (search.exhausted()) {
      break;
    } else {
      best.lower_bound = std::min(search.next_bound(), best.loads.slowest);
    }
    bound = best.lower_bound + (best.loads.slowest - best.lower_bound) / 2;
  }
  return best;
}

// "3.0 GiB (3221225472)" for real sizes: the exact number can be given as a limit. Plain numbers for small
// ones, which may be in any unit.
std::string limit_text(double bytes) {
  return bytes >= 1024 ? fmt::format("{} ({:.0f})", format_bytes(static_cast<std::uint64_t>(bytes)), bytes)
                       : fmt::format("{:g}", bytes);
}

[[noreturn]] void refuse_limits(const SearchSpace& space, std::int64_t max_states) {
  const double largest = *std::max_element(space.limits.begin(), space.limits.end());
  const std::string what = "partition: memory limit of a rank";
  for (int layer = 0; layer < space.layers; ++layer) {
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t stage = 0; stage < space.bytes.fixed.size(); ++stage)
      least = std::min(least,
                       space.bytes.of(static_cast<int>(stage), layer, layer + 1) - space.bytes.fixed[stage]);
    if (least > largest)
      throw ValueError(
          describe(what, limit_text(largest),
                   fmt::format("at least {}, which layer {} alone needs", limit_text(least), layer),
                   "raise the limit, or divide the layer over more ranks"));
  }
  // The smallest limit is a split whose time is its memory.
  SearchSpace memory = space;
  memory.time = space.bytes;
  memory.limits.clear();
  memory.by_stage = false;
  const std::optional<PlacedPartition> smallest = best_split(memory, max_states);
  PENSTOCK_INVARIANT(smallest, "without limits there is a split");
  const double needed = smallest->loads.slowest;
  if (needed <= largest)
    throw ValueError(describe(
        what, fmt::format("different limits, the largest {}", limit_text(largest)),
        "limits that allow a split",
        fmt::format("equal limits of {} for all ranks would be enough", limit_text(std::ceil(needed)))));
  throw ValueError(describe(what, limit_text(largest),
                            fmt::format("at least {}{}", limit_text(std::ceil(needed)),
                                        smallest->is_optimal() ? ", the smallest that allows a split" : ""),
                            "raise the limit, use more ranks, or shard the model"));
}

}  // namespace

PlacedPartition partition_placed(const PlacedLayers& layers) {
  const SearchSpace space = space_of(layers);
  const bool one_each = std::all_of(space.rank_stages.begin(), space.rank_stages.end(),
                                    [](const std::vector<int>& of_rank) { return of_rank.size() < 2; });
  if (space.by_stage || one_each) {
    PlacedPartition simple{
        .parts = partition_by_cost(layers.costs, space.parts, layers.ends), .loads = {}, .lower_bound = 0};
    simple.loads = loads_of(space, simple.parts);
    simple.lower_bound = simple.loads.slowest;
    if (within_limits(space, simple.loads)) return simple;
  }
  if (auto best = best_split(space, layers.max_states)) return std::move(*best);
  refuse_limits(space, layers.max_states);
}

PlacedLoads placed_loads(const PlacedLayers& layers, const std::vector<LayerRange>& parts) {
  const SearchSpace space = space_of(layers);
  int begin = 0;
  bool is_split = parts.size() == static_cast<std::size_t>(space.parts);
  for (const LayerRange& part : parts) {
    is_split = is_split && part.begin == begin && part.end >= begin && part.end <= space.layers;
    begin = part.end;
  }
  if (!is_split || begin != space.layers)
    throw ValueError(
        describe("partition: parts", fmt::format("{} that do not cover the layers", parts.size()),
                 fmt::format("{} ranges, one after the other, of {} layers", space.parts, space.layers)));
  return loads_of(space, parts);
}

}  // namespace penstock::plan
