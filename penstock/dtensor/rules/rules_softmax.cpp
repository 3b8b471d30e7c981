// Softmax and log_softmax. Every dim may be split. Along the softmax dim itself the ranks exchange the
// maximum and the sum of exponentials of each row, never the row; losses over a split vocabulary are based on
// this.
#include <ATen/ATen.h>

#include <limits>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/strategy_builder.h"

namespace penstock::detail {
namespace {

std::int64_t softmax_dim(const ShardingCall& call) {
  return ShardingCall::wrap_dim(call.argument("dim").toInt(), call.inputs[0].ndim());
}

// The maximum of each row over all ranks. A rank that holds nothing of the rows does not contribute.
at::Tensor row_maximum(const LocalContext& context, const at::Tensor& rows, std::int64_t dim,
                       const std::vector<int>& axes) {
  std::vector<std::int64_t> shape = rows.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = 1;
  const at::Tensor maximum = rows.size(dim) > 0
                                 ? rows.amax(dim, true).contiguous()
                                 : rows.new_full(shape, -std::numeric_limits<double>::infinity());
  reduce_over(context.mesh, axes, maximum, comm::ReduceOp::Max);
  return maximum;
}

at::Tensor row_sum(const LocalContext& context, const at::Tensor& rows, std::int64_t dim,
                   const std::vector<int>& axes) {
  const at::Tensor sum = rows.sum(dim, true).contiguous();
  reduce_over(context.mesh, axes, sum, comm::ReduceOp::Sum);
  return sum;
}

Sharding softmax(const ShardingCall& call, bool logarithm) {
  const std::int64_t dim = softmax_dim(call);
  std::vector<AxisStrategy> strategies;
  for (std::int64_t each = 0; each < call.inputs[0].ndim(); ++each)
    StrategyBuilder(call).in("self", Shard{each}).out(0, Shard{each}).add_to(strategies);
  Sharding sharding = choose(call, std::move(strategies));
  if (!splits_dim(sharding.inputs[0], dim)) return sharding;
  sharding.local = [dim, logarithm](const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
    const at::Tensor self = local_argument(context, *stack, "self");
    const auto axes = axes_of(context, "self", dim);
    at::Tensor rows = self.to(accumulation_type(self.scalar_type()));
    rows = rows - row_maximum(context, rows, dim, axes);
    const at::Tensor powers = rows.exp();
    const at::Tensor sum = row_sum(context, powers, dim, axes);
    store_results(context, stack,
                  {(logarithm ? rows - sum.log() : powers / sum).to(context.call.outputs[0].dtype)});
  };
  return sharding;
}

Sharding softmax_backward(const ShardingCall& call, bool logarithm) {
  const std::int64_t dim = softmax_dim(call);
  std::vector<AxisStrategy> strategies;
  for (std::int64_t each = 0; each < call.inputs[0].ndim(); ++each)
    StrategyBuilder(call)
        .in("grad_output", Shard{each})
        .in("output", Shard{each})
        .out(0, Shard{each})
        .add_to(strategies);
  // Linear in the gradient.
  for (const PartialOp kind : partial_kinds(call))
    if (kind == PartialOp::Sum || kind == PartialOp::Avg)
      StrategyBuilder(call).in("grad_output", Partial{kind}).out(0, Partial{kind}).add_to(strategies);
  Sharding sharding = choose(call, std::move(strategies));
  if (!splits_dim(sharding.inputs[0], dim)) return sharding;
  sharding.local = [dim, logarithm](const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
    const at::Tensor given = local_argument(context, *stack, "grad_output");
    const at::ScalarType type = accumulation_type(given.scalar_type());
    const at::Tensor gradient = given.to(type), output = local_argument(context, *stack, "output").to(type);
    const auto axes = axes_of(context, "output", dim);
    at::Tensor result;
    if (logarithm) {
      result = gradient - output.exp() * row_sum(context, gradient, dim, axes);
    } else {
      const at::Tensor weighted = gradient * output;
      result = weighted - output * row_sum(context, weighted, dim, axes);
    }
    store_results(context, stack, {result.to(context.call.outputs[0].dtype)});
  };
  return sharding;
}

}  // namespace

void add_softmax_rules(RuleTable& table) {
  table.add({"_softmax"}, [](const ShardingCall& call) { return softmax(call, false); });
  table.add({"_log_softmax"}, [](const ShardingCall& call) { return softmax(call, true); });
  table.add({"_softmax_backward_data"},
            [](const ShardingCall& call) { return softmax_backward(call, false); });
  table.add({"_log_softmax_backward_data"},
            [](const ShardingCall& call) { return softmax_backward(call, true); });
}

}  // namespace penstock::detail
