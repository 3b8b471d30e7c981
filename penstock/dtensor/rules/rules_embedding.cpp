// Embeddings: the indices may be split, the width of the rows, and the rows themselves. A rank that does not
// hold the row of an index returns zeros, so the result is a partial sum.
#include <ATen/ATen.h>

#include "penstock/dtensor/tensor/local_index.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/strategy_builder.h"

namespace penstock::detail {
namespace {

void local_lookup(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const at::Tensor weight = local_argument(context, *stack, "weight"),
                   indices = local_argument(context, *stack, "indices");
  const auto& shape = input_named(context.call, "weight")->whole.shape;
  check_indices(indices, {}, shape[0], "embedding: an index");
  const LocalIndex found = find_held(indices, held_segments(context, shape, decided(context, "weight"), 0));
  std::vector<std::int64_t> result_shape = indices.sizes().vec();
  result_shape.push_back(weight.size(1));
  at::Tensor result = weight.new_zeros(result_shape);
  if (weight.size(0) > 0)
    result = weight.index_select(0, found.position.reshape({-1}))
                 .view(result_shape)
                 .masked_fill_(found.held.logical_not().unsqueeze(-1), 0);
  store_results(context, stack, {result});
}

Sharding embedding(const ShardingCall& call) {
  const std::int64_t ndim = input_named(call, "indices")->ndim();
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < ndim; ++dim)
    StrategyBuilder(call).in("indices", Shard{dim}).out(0, Shard{dim}).add_to(strategies);
  StrategyBuilder(call).in("weight", Shard{1}).out(0, Shard{ndim}).add_to(strategies);
  StrategyBuilder(call).in("weight", Shard{0}).out(0, Partial{}).add_to(strategies);
  for (const PartialOp kind : partial_kinds(call))
    if (kind == PartialOp::Sum || kind == PartialOp::Avg)
      StrategyBuilder(call).in("weight", Partial{kind}).out(0, Partial{kind}).add_to(strategies);
  Sharding sharding = choose(call, std::move(strategies));
  if (!axes_splitting(sharding.inputs[static_cast<std::size_t>(call.index_at(call.argument_index("weight")))],
                      0)
           .empty())
    sharding.local = local_lookup;
  return sharding;
}

// The gradient of the rows. It is not split by rows here: if gradient and indices are whole, so is the
// result, and slicing a rank's rows out of it needs no communication.
Sharding embedding_backward(const ShardingCall& call) {
  const std::int64_t ndim = input_named(call, "indices")->ndim();
  std::vector<AxisStrategy> strategies;
  StrategyBuilder(call).in("grad_output", Shard{ndim}).out(0, Shard{1}).add_to(strategies);
  // Counting how often an index occurs requires all of them.
  if (!call.argument("scale_grad_by_freq").toBool())
    for (std::int64_t dim = 0; dim < ndim; ++dim)
      StrategyBuilder(call)
          .in("grad_output", Shard{dim})
          .in("indices", Shard{dim})
          .out(0, Partial{})
          .add_to(strategies);
  for (const PartialOp kind : partial_kinds(call))
    if (kind == PartialOp::Sum || kind == PartialOp::Avg)
      StrategyBuilder(call).in("grad_output", Partial{kind}).out(0, Partial{kind}).add_to(strategies);
  return choose(call, std::move(strategies));
}

}  // namespace

void add_embedding_rules(RuleTable& table) {
  table.add({"embedding"}, embedding);
  table.add({"embedding_dense_backward"}, embedding_backward);
}

}  // namespace penstock::detail
