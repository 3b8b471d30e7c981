#include "penstock/dtensor/plan/redistribute_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor/plan/split_order.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

using detail::AxisSplit;
using detail::SplitOrder;

// Reading and writing memory has a cost too, though far less than sending: it makes the search slice before
// it sends.
constexpr double kLocalBytesPerSecond = 50e9;
constexpr double kLocalLatency = 1e-6;

struct Edge {
  RedistributeKind kind;
  int axis;
  SplitOrder to;
};

class Planner {
 public:
  Planner(const TensorSize& tensor, const std::vector<std::int64_t>& mesh_shape,
          const std::vector<AxisCost>& costs, PartialTarget partial_target)
      : tensor_(tensor), mesh_shape_(mesh_shape), costs_(costs), partial_target_(partial_target) {
    if (costs_.empty()) costs_.resize(1);
    if (costs_.size() == 1) costs_.resize(mesh_shape.size(), costs_[0]);
    if (costs_.size() != mesh_shape.size())
      throw ValueError(describe("plan_redistribute: costs", fmt::format("{} entries", costs_.size()),
                                fmt::format("one, or one for each of {} mesh axes", mesh_shape.size())));
  }

  RedistributePlan run(const SplitOrder& from, const SplitOrder& to) {
    for (std::size_t axis = 0; axis < to.partial.size(); ++axis)
      check_target(from, to, static_cast<int>(axis));
    struct Reached {
      double seconds;
      std::size_t steps;
      std::optional<std::pair<SplitOrder, Edge>> by;
    };
    std::map<SplitOrder, Reached> reached{{from, {0, 0, std::nullopt}}};
    std::set<SplitOrder> settled;
    // Ties are broken by the number of steps and then by the placements: every rank must find the same plan.
    using Entry = std::tuple<double, std::size_t, SplitOrder>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
    queue.emplace(0, 0, from);
    while (!queue.empty()) {
      const auto [seconds, steps, state] = queue.top();
      queue.pop();
      if (!settled.insert(state).second) continue;
      if (state == to) break;
      for (Edge& edge : edges(state, to)) {
        const double total = seconds + cost(state, edge).seconds;
        const auto found = reached.find(edge.to);
        if (found != reached.end() &&
            std::pair(found->second.seconds, found->second.steps) <= std::pair(total, steps + 1))
          continue;
        queue.emplace(total, steps + 1, edge.to);
        const SplitOrder next = edge.to;
        reached.insert_or_assign(next, Reached{total, steps + 1, std::pair(state, std::move(edge))});
      }
    }
    RedistributePlan plan;
    for (SplitOrder at = to; at != from;) {
      const auto found = reached.find(at);
      PENSTOCK_INVARIANT(found != reached.end() && found->second.by,
                         "every placement can be reached through Replicate");
      const auto& [before, edge] = *found->second.by;
      plan.steps.push_back(step(before, edge));
      at = SplitOrder(before);
    }
    std::reverse(plan.steps.begin(), plan.steps.end());
    for (const RedistributeStep& step : plan.steps) {
      plan.bytes += step.bytes;
      plan.seconds += step.seconds;
    }
    return plan;
  }

 private:
  std::int64_t size(int axis) const { return mesh_shape_[static_cast<std::size_t>(axis)]; }

  void check_target(const SplitOrder& from, const SplitOrder& to, int axis) const {
    const auto at = static_cast<std::size_t>(axis);
    if (!to.partial[at] || from.partial[at] == to.partial[at] || partial_target_ == PartialTarget::Allow)
      return;
    if (*to.partial[at] == PartialOp::Sum && from.dim_of(axis)) return;
    throw ValueError(
        describe(fmt::format("redistribute to {} on mesh axis {}",
                             Placement(Partial{*to.partial[at]}).to_string(), axis),
                 from.placements(mesh_shape_)[at].to_string(), "the same Partial, or a shard for P(sum)",
                 "redistribute to Replicate or Shard instead; partial values are created by operators"));
  }

  // Steps from a state. Partial is created only if the target has it.
  std::vector<Edge> edges(const SplitOrder& state, const SplitOrder& target) const {
    std::vector<Edge> result;
    for (int axis = 0; axis < static_cast<int>(mesh_shape_.size()); ++axis) {
      const auto at = static_cast<std::size_t>(axis);
      if (state.partial[at]) {
        SplitOrder reduced = state;
        reduced.partial[at].reset();
        for (SplitOrder& scattered : with_split(reduced, axis, target))
          result.push_back({RedistributeKind::ReduceScatter, axis, std::move(scattered)});
        result.push_back({RedistributeKind::AllReduce, axis, std::move(reduced)});
      } else if (const auto dim = state.dim_of(axis)) {
        if (state.splits[*dim].back().axis != axis) continue;  // another axis split this dim later
        SplitOrder joined = state;
        joined.splits[*dim].pop_back();
        for (SplitOrder& moved : with_split(joined, axis, target))
          if (moved.dim_of(axis) != dim || moved.splits[*dim].back() != state.splits[*dim].back())
            result.push_back({RedistributeKind::AllToAll, axis, std::move(moved)});
        if (target.partial[at] == PartialOp::Sum) {
          SplitOrder embedded = joined;
          embedded.partial[at] = PartialOp::Sum;
          result.push_back({RedistributeKind::Embed, axis, std::move(embedded)});
        }
        result.push_back({RedistributeKind::AllGather, axis, std::move(joined)});
      } else {
        for (SplitOrder& sliced : with_split(state, axis, target))
          result.push_back({RedistributeKind::Slice, axis, std::move(sliced)});
        if (target.partial[at] && partial_target_ == PartialTarget::Allow) {
          SplitOrder term = state;
          term.partial[at] = target.partial[at];
          result.push_back({RedistributeKind::Term, axis, std::move(term)});
        }
      }
    }
    return result;
  }

  // The states in which `axis` splits one more dim, last. After a literal strided shard, and for one, only
  // the order of the target can be written as placements.
  std::vector<SplitOrder> with_split(const SplitOrder& state, int axis, const SplitOrder& target) const {
    std::vector<SplitOrder> result;
    const auto add = [&](std::size_t dim, AxisSplit split) {
      SplitOrder more = state;
      more.splits[dim].push_back(split);
      result.push_back(std::move(more));
    };
    for (std::size_t dim = 0; dim < state.splits.size(); ++dim) {
      const auto& held = state.splits[dim];
      const auto& wanted = target.splits[dim];
      const bool literal = std::any_of(held.begin(), held.end(),
                                       [](const AxisSplit& split) { return split.literal_factor != 0; });
      if (!literal) add(dim, {axis, 0});
      if (held.size() < wanted.size() && wanted[held.size()].axis == axis &&
          (literal || wanted[held.size()].literal_factor != 0) &&
          std::equal(held.begin(), held.end(), wanted.begin()))
        add(dim, wanted[held.size()]);
    }
    return result;
  }

  // Bytes of the largest local tensor.
  std::int64_t local_bytes(const SplitOrder& state) const {
    std::int64_t bytes = tensor_.element_bytes;
    for (std::size_t dim = 0; dim < state.splits.size(); ++dim) {
      std::int64_t length = tensor_.shape[dim];
      for (const AxisSplit& split : state.splits[dim]) {
        const std::int64_t pieces = std::max<std::int64_t>(split.literal_factor, 1);
        const std::int64_t piece = (length + pieces - 1) / pieces;
        length = pieces * ((piece + size(split.axis) - 1) / size(split.axis));
      }
      bytes *= length;
    }
    return bytes;
  }

  struct Cost {
    std::int64_t bytes;
    double seconds;
  };

  Cost cost(const SplitOrder& state, const Edge& edge) const {
    const std::int64_t n = size(edge.axis);
    const std::int64_t before = local_bytes(state), after = local_bytes(edge.to);
    std::int64_t sent = 0;
    switch (edge.kind) {
      case RedistributeKind::Slice:
      case RedistributeKind::Embed:
      case RedistributeKind::Term:
        break;
      case RedistributeKind::AllGather:
        sent = (n - 1) * before;
        break;
      case RedistributeKind::ReduceScatter:
        sent = (n - 1) * after;
        break;
      case RedistributeKind::AllReduce:
        sent = 2 * (n - 1) * ((before + n - 1) / n);
        break;
      case RedistributeKind::AllToAll:
        sent = (n - 1) * ((before + n - 1) / n);
        break;
    }
    const double local = kLocalLatency + static_cast<double>(before + after) / kLocalBytesPerSecond;
    const bool alone = edge.kind == RedistributeKind::Slice || edge.kind == RedistributeKind::Embed ||
                       edge.kind == RedistributeKind::Term;
    if (n == 1 || alone) return {0, local};
    const AxisCost& link = costs_[static_cast<std::size_t>(edge.axis)];
    return {sent, local + link.latency_s + static_cast<double>(sent) / link.bytes_per_s};
  }

  RedistributeStep step(const SplitOrder& before, const Edge& edge) const {
    RedistributeStep step;
    step.kind = edge.kind;
    step.axis = edge.axis;
    step.before = before.placements(mesh_shape_);
    step.after = edge.to.placements(mesh_shape_);
    step.from = step.before[static_cast<std::size_t>(edge.axis)];
    step.to = step.after[static_cast<std::size_t>(edge.axis)];
    const Cost price = cost(before, edge);
    step.bytes = price.bytes;
    step.seconds = price.seconds;
    return step;
  }

  const TensorSize& tensor_;
  const std::vector<std::int64_t>& mesh_shape_;
  std::vector<AxisCost> costs_;
  const PartialTarget partial_target_;
};

}  // namespace

std::string_view to_text(RedistributeKind kind) {
  switch (kind) {
    case RedistributeKind::Slice:
      return "slice";
    case RedistributeKind::AllGather:
      return "all_gather";
    case RedistributeKind::AllToAll:
      return "all_to_all";
    case RedistributeKind::AllReduce:
      return "all_reduce";
    case RedistributeKind::ReduceScatter:
      return "reduce_scatter";
    case RedistributeKind::Embed:
      return "embed";
    case RedistributeKind::Term:
      return "term";
  }
  return "?";
}

std::string RedistributePlan::to_string() const {
  if (steps.empty()) return "nothing to do\n";
  std::string text;
  for (const RedistributeStep& step : steps)
    text += fmt::format("axis {}  {:<20} {:<15} {:>12} bytes\n", step.axis,
                        step.from.to_string() + " -> " + step.to.to_string(), to_text(step.kind), step.bytes);
  return text;
}

RedistributePlan plan_redistribute(const TensorSize& tensor, const std::vector<std::int64_t>& mesh_shape,
                                   const Placements& from, const Placements& to,
                                   const std::vector<AxisCost>& costs, PartialTarget partial_target) {
  const int axes = static_cast<int>(mesh_shape.size());
  const auto dims = static_cast<std::int64_t>(tensor.shape.size());
  const SplitOrder source(normalize_placements(from, axes, dims), mesh_shape, tensor.shape.size());
  const SplitOrder target(normalize_placements(to, axes, dims), mesh_shape, tensor.shape.size());
  return Planner(tensor, mesh_shape, costs, partial_target).run(source, target);
}

}  // namespace penstock
