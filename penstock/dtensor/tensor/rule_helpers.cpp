#include "penstock/dtensor/tensor/rule_helpers.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "penstock/comm/group/operators.h"
#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/tensor_subclass.h"

namespace penstock::detail {

std::optional<std::int64_t> broadcast_dim(const std::vector<std::int64_t>& shape, std::int64_t dim,
                                          const std::vector<std::int64_t>& result) {
  const std::int64_t own =
      dim - (static_cast<std::int64_t>(result.size()) - static_cast<std::int64_t>(shape.size()));
  if (own < 0 || shape[static_cast<std::size_t>(own)] != result[static_cast<std::size_t>(dim)])
    return std::nullopt;
  return own;
}

AxisStrategy replicated_strategy(const ShardingCall& call) {
  return {std::vector<Placement>(call.inputs.size()), std::vector<Placement>(call.outputs.size())};
}

std::vector<AxisStrategy> elementwise_strategies(const ShardingCall& call) {
  std::vector<AxisStrategy> strategies;
  if (call.outputs.empty()) return strategies;
  const auto& result = call.outputs[0].shape;
  for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(result.size()); ++dim) {
    AxisStrategy strategy = replicated_strategy(call);
    for (std::size_t i = 0; i < call.inputs.size(); ++i)
      if (const auto own = broadcast_dim(call.inputs[i].whole.shape, dim, result); own)
        strategy.inputs[i] = Shard{*own};
    for (std::size_t i = 0; i < call.outputs.size(); ++i)
      if (const auto own = broadcast_dim(call.outputs[i].shape, dim, result))
        strategy.outputs[i] = Shard{*own};
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

std::vector<AxisStrategy> independent_dims(const ShardingCall& call, const std::set<std::int64_t>& except) {
  std::vector<AxisStrategy> strategies;
  const auto& shape = call.inputs[0].whole.shape;
  for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(shape.size()); ++dim) {
    if (except.count(dim)) continue;
    AxisStrategy strategy = replicated_strategy(call);
    for (std::size_t i = 0; i < call.inputs.size(); ++i)
      if (call.inputs[i].whole.shape == shape) strategy.inputs[i] = Shard{dim};
    for (std::size_t i = 0; i < call.outputs.size(); ++i)
      if (call.outputs[i].shape == shape) strategy.outputs[i] = Shard{dim};
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

std::vector<PartialOp> partial_kinds(const ShardingCall& call) {
  std::vector<PartialOp> kinds;
  for (const ShardingInput& input : call.inputs)
    for (const Placement& placement : input.placements)
      if (placement.is_partial() &&
          std::find(kinds.begin(), kinds.end(), placement.partial_op()) == kinds.end())
        kinds.push_back(placement.partial_op());
  return kinds;
}

std::set<std::int64_t> dims_of(const c10::IValue& value, std::int64_t ndim) {
  std::set<std::int64_t> dims;
  if (value.isInt()) dims.insert(ShardingCall::wrap_dim(value.toInt(), ndim));
  if (value.isList())
    for (const c10::IValue& element : value.toListRef())
      dims.insert(ShardingCall::wrap_dim(element.toInt(), ndim));
  if (dims.empty())
    for (std::int64_t dim = 0; dim < ndim; ++dim) dims.insert(dim);
  return dims;
}

std::vector<std::int64_t> local_shape(const ShardingCall& call, const std::vector<std::int64_t>& shape,
                                      const Placements& placements) {
  return local_shape_and_offset(shape, call.mesh_shape, call.coordinate, placements).shape;
}

std::vector<int> axes_splitting(const Placements& placements, std::int64_t dim) {
  std::vector<int> axes;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (placements[axis].splits(dim)) axes.push_back(static_cast<int>(axis));
  return axes;
}

std::vector<int> axes_splitting(const Placements& placements, const std::set<std::int64_t>& dims) {
  std::vector<int> axes;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (placements[axis].splits() && dims.count(placements[axis].dim()))
      axes.push_back(static_cast<int>(axis));
  return axes;
}

Sharding placed_like_first_input(const ShardingCall& call) {
  auto strategies = elementwise_strategies(call);
  for (const PartialOp kind : partial_kinds(call)) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
  return choose(call, std::move(strategies));
}

c10::Scalar highest_value(at::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) return std::numeric_limits<double>::infinity();
  if (dtype == at::kBool) return true;
  const int bits = static_cast<int>(8 * c10::elementSize(dtype));
  if (!c10::isSignedType(dtype)) return (std::int64_t{1} << bits) - 1;
  return static_cast<std::int64_t>(std::numeric_limits<std::int64_t>::max() >> (64 - bits));
}

c10::Scalar lowest_value(at::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) return -std::numeric_limits<double>::infinity();
  if (dtype == at::kBool) return false;
  if (!c10::isSignedType(dtype)) return 0;
  return -highest_value(dtype).toLong() - 1;
}

void refuse_unknown_shape(const OperatorTraits& traits) {
  throw ValueError(fmt::format(
      "{}: the shape of the result depends on the values of a distributed tensor, so no rank knows its part; "
      "compute it on full_tensor(), "
      "or on to_local() for the part of each rank; for masks, where() and masked_fill() keep the shape",
      traits.name));
}

void reduce_over(const comm::MeshGroups& mesh, const std::vector<int>& axes, const at::Tensor& tensor,
                 comm::ReduceOp op) {
  for (const int axis : axes) {
    if (mesh.shape()[static_cast<std::size_t>(axis)] == 1) continue;
    // A tensor without memory of its own is reduced by an operator, which tracers see.
    if (is_wrapper(tensor))
      tensor.copy_(comm::functional::wait_tensor(comm::functional::all_reduce(tensor, op, mesh.group(axis))));
    else
      mesh.group(axis).all_reduce(tensor, op, {.label = "operator on distributed tensors"}).wait();
  }
}

}  // namespace penstock::detail
