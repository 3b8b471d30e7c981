#include "penstock/sharding_rule.h"

#include <ATen/core/enum_tag.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

double bytes_of(const ShardingInput& input, const ShardingCall& call, std::size_t axis) {
  double bytes =
      static_cast<double>(input.whole.numel()) * static_cast<double>(c10::elementSize(input.whole.dtype));
  for (std::size_t other = 0; other < call.axes(); ++other)
    if (other != axis && input.placements[other].splits())
      bytes /= static_cast<double>(call.mesh_shape[other]);
  return bytes;
}

// The cost, in bytes sent, of bringing an input to a placement along one axis. Latency counts as some bytes,
// work without communication as a few.
double cost_of(const Placement& from, const Placement& to, double bytes, double ranks) {
  if (from == to) return 0;
  constexpr double kLatency = 2e5, kLocal = 1e2;
  const double part = bytes * (ranks - 1) / ranks;
  if (from.is_replicate()) {
    if (to.splits()) return kLocal + bytes * 0.01;
    // Partial values have to be reduced later, so they cost as much as reducing now, and a little more.
    return kLatency + 2 * part + kLocal;
  }
  if (from.is_partial()) {
    if (to.is_partial()) return kNever;
    return kLatency + (to.splits() ? part : 2 * part);
  }
  if (to.is_replicate()) return kLatency + bytes * (ranks - 1) / ranks;
  if (to.is_partial()) return to.is_partial(PartialOp::Sum) ? kLatency + 2 * part : kNever;
  return kLatency + part / ranks;
}

// The size of the dims that a strategy splits, if they all have the same.
std::optional<std::int64_t> common_size(const ShardingCall& call, const AxisStrategy& strategy) {
  std::optional<std::int64_t> size;
  const auto agrees = [&](const Placement& placement, const std::vector<std::int64_t>& shape) {
    if (!placement.splits()) return true;
    const std::int64_t here = shape[static_cast<std::size_t>(placement.dim())];
    if (!size) size = here;
    return *size == here;
  };
  for (std::size_t i = 0; i < call.inputs.size(); ++i)
    if (!agrees(strategy.inputs[i], call.inputs[i].whole.shape)) return std::nullopt;
  for (std::size_t i = 0; i < call.outputs.size(); ++i)
    if (!agrees(strategy.outputs[i], call.outputs[i].shape)) return std::nullopt;
  return size;
}

// The strategy itself and, if its shards may be strided, its variants strided like each strided input.
std::vector<AxisStrategy> variants_of(const ShardingCall& call, const AxisStrategy& strategy,
                                      std::size_t axis) {
  std::vector<AxisStrategy> variants{strategy};
  std::vector<std::int64_t> factors;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const Placement& now = call.inputs[i].placements[axis];
    if (!now.is_strided_shard() || !strategy.inputs[i].is_shard(now.dim())) continue;
    if (std::find(factors.begin(), factors.end(), now.split_factor()) == factors.end())
      factors.push_back(now.split_factor());
  }
  if (factors.empty() || !common_size(call, strategy)) return variants;
  for (const std::int64_t factor : factors) {
    AxisStrategy strided = strategy;
    const auto change = [&](Placement& placement) {
      if (placement.is_shard()) placement = StridedShard{placement.dim(), factor};
    };
    std::for_each(strided.inputs.begin(), strided.inputs.end(), change);
    std::for_each(strided.outputs.begin(), strided.outputs.end(), change);
    variants.push_back(std::move(strided));
  }
  return variants;
}

double cost_of(const ShardingCall& call, const AxisStrategy& strategy, std::size_t axis) {
  double total = 0;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const ShardingInput& input = call.inputs[i];
    const Placement& now = input.placements[axis];
    if (input.written && now != strategy.inputs[i]) return kNever;
    total += cost_of(now, strategy.inputs[i], bytes_of(input, call, axis),
                     static_cast<double>(call.mesh_shape[axis]));
  }
  // A written input must keep its placement, unless the operator moves its dims (transpose_).
  if (call.op.hasTag(at::Tag::inplace_view)) return total;
  std::size_t output = 0;
  for (const ReturnAlias& alias : call.traits.returns) {
    if (output >= call.outputs.size()) break;
    if (alias.kind == ReturnAlias::Kind::Same)
      if (const int input = call.index_at(alias.argument);
          input >= 0 && strategy.outputs[output] != strategy.inputs[static_cast<std::size_t>(input)] &&
          call.outputs[output].shape == call.inputs[static_cast<std::size_t>(input)].whole.shape)
        return kNever;
    ++output;
  }
  return total;
}

}  // namespace

const ShardingInput* ShardingCall::input_at(int argument, int element) const {
  const int index = index_at(argument, element);
  return index < 0 ? nullptr : &inputs[static_cast<std::size_t>(index)];
}

int ShardingCall::index_at(int argument, int element) const {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].argument == argument && inputs[i].element == element) return static_cast<int>(i);
  return -1;
}

int ShardingCall::argument_index(std::string_view name) const {
  const auto& all = op.schema().arguments();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (all[i].name() == name) return static_cast<int>(i);
  throw InvariantError(fmt::format("{} has no argument {}", traits.name, name));
}

bool ShardingCall::has_argument(std::string_view name) const {
  const auto& all = op.schema().arguments();
  return std::any_of(all.begin(), all.end(),
                     [&](const c10::Argument& argument) { return argument.name() == name; });
}

std::int64_t ShardingCall::wrap_dim(std::int64_t dim, std::int64_t ndim) {
  return dim < 0 ? dim + std::max<std::int64_t>(ndim, 1) : dim;
}

Sharding choose(const ShardingCall& call, std::vector<AxisStrategy> strategies,
                std::vector<std::size_t>& taken) {
  for (const AxisStrategy& strategy : strategies)
    PENSTOCK_INVARIANT(
        strategy.inputs.size() == call.inputs.size() && strategy.outputs.size() == call.outputs.size(),
        fmt::format("the rule of {} returns a placement for every input and output", call.traits.name));
  strategies.push_back(
      {std::vector<Placement>(call.inputs.size()), std::vector<Placement>(call.outputs.size())});
  Sharding sharding;
  sharding.inputs.assign(call.inputs.size(), Placements(call.axes()));
  sharding.outputs.assign(call.outputs.size(), Placements(call.axes()));
  taken.clear();
  for (std::size_t axis = 0; axis < call.axes(); ++axis) {
    double best_cost = kNever;
    std::size_t best = 0;
    AxisStrategy chosen;
    for (std::size_t i = 0; i < strategies.size(); ++i)
      for (AxisStrategy& strategy : variants_of(call, strategies[i], axis))
        if (const double cost = cost_of(call, strategy, axis); cost < best_cost) {
          best_cost = cost;
          best = i;
          chosen = std::move(strategy);
        }
    if (best_cost == kNever) {
      std::string written;
      for (const ShardingInput& input : call.inputs)
        if (input.written) written += (written.empty() ? "" : " and ") + to_string(input.placements);
      throw ValueError(
          describe(fmt::format("{}: the tensor that is written", call.traits.name), written,
                   fmt::format("placements in which the operator can write on mesh axis {}", axis),
                   "redistribute it first (Replicate always works), or use the out-of-place form"));
    }
    taken.push_back(best);
    for (std::size_t i = 0; i < call.inputs.size(); ++i) sharding.inputs[i][axis] = chosen.inputs[i];
    for (std::size_t i = 0; i < call.outputs.size(); ++i) sharding.outputs[i][axis] = chosen.outputs[i];
  }
  return sharding;
}

Sharding choose(const ShardingCall& call, std::vector<AxisStrategy> strategies) {
  std::vector<std::size_t> taken;
  return choose(call, std::move(strategies), taken);
}

Sharding replicate_all(const ShardingCall& call) { return choose(call, {}); }

}  // namespace penstock
