// Operators that look along one dim, or along all but one: gated linear units and weight normalization.
#include <vector>

#include "penstock/dtensor/rule_helpers.h"
#include "penstock/dtensor/rule_registry.h"
#include "penstock/dtensor/strategy_builder.h"

namespace penstock::detail {
namespace {

// All tensors have the same dims: split along one of them.
AxisStrategy split_alike(const ShardingCall& call, std::int64_t dim) {
  return {std::vector<Placement>(call.inputs.size(), Shard{dim}), std::vector<Placement>(call.outputs.size(), Shard{dim})};
}

// Both halves of `dim` are needed; the others are independent.
Sharding glu_backward(const ShardingCall& call) {
  const std::int64_t ndim = input_named(call, "self")->ndim(), halved = ShardingCall::wrap_dim(call.argument("dim").toInt(), ndim);
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < ndim; ++dim)
    if (dim != halved) strategies.push_back(split_alike(call, dim));
  return choose(call, std::move(strategies));
}

// Each slice along `dim` has a norm of its own.
Sharding weight_norm(const ShardingCall& call) {
  const std::int64_t dim = ShardingCall::wrap_dim(call.argument("dim").toInt(), call.inputs[0].ndim());
  Sharding sharding = choose(call, {split_alike(call, dim)});
  skip_where_empty(call, sharding, {call.op.schema().arguments()[0].name()}, {true, true});
  return sharding;
}

}  // namespace

void add_gate_rules(RuleTable& table) {
  table.add({"glu_backward"}, glu_backward);
  table.add({"_weight_norm_interface", "_weight_norm_interface_backward"}, weight_norm);
}

}  // namespace penstock::detail
