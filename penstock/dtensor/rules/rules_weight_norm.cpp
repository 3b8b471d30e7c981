// Weight normalization: each slice along `dim` has its own norm, so that dim may be split.
#include <vector>

#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/strategy_builder.h"

namespace penstock::detail {
namespace {

// v (..., slices, ...), g and the norms with size 1 in all other dims; the backward has them all.
Sharding weight_norm(const ShardingCall& call) {
  const std::int64_t dim = ShardingCall::wrap_dim(call.argument("dim").toInt(), call.inputs[0].ndim());
  const AxisStrategy slices{std::vector<Placement>(call.inputs.size(), Shard{dim}),
                            std::vector<Placement>(call.outputs.size(), Shard{dim})};
  Sharding sharding = choose(call, {slices});
  skip_where_empty(call, sharding, {call.op.schema().arguments()[0].name()}, {true, true});
  return sharding;
}

}  // namespace

void add_weight_norm_rules(RuleTable& table) {
  table.add({"_weight_norm_interface", "_weight_norm_interface_backward"}, weight_norm);
}

}  // namespace penstock::detail
