// Matrix products: rows of the left, columns of the right, and the inner dim, whose products are partial
// sums.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <optional>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

// Dims of the product as positions in the left, right and result tensor.
struct ProductDim {
  std::optional<std::int64_t> left, right, result;
};

Placement shard(const std::optional<std::int64_t>& dim) { return dim ? Placement(Shard{*dim}) : Placement(); }

// Inputs in order: [added], left, right; `added` is broadcast to the result.
Sharding product(const ShardingCall& call, const std::vector<ProductDim>& dims, bool added) {
  const std::size_t left = added ? 1 : 0, right = left + 1;
  const auto& result = call.outputs[0].shape;
  std::vector<AxisStrategy> strategies;
  for (const ProductDim& dim : dims) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[left] = shard(dim.left);
    strategy.inputs[right] = shard(dim.right);
    strategy.outputs[0] = dim.result ? Placement(Shard{*dim.result}) : Placement(Partial{});
    if (added) {
      if (dim.result)
        strategy.inputs[0] = shard(broadcast_dim(call.inputs[0].whole.shape, *dim.result, result));
      else
        strategy.inputs[0] = Partial{};
    }
    strategies.push_back(std::move(strategy));
  }
  for (const PartialOp kind : partial_kinds(call)) {
    if (kind != PartialOp::Sum && kind != PartialOp::Avg) continue;
    for (const std::size_t term : {left, right}) {
      AxisStrategy strategy = replicated_strategy(call);
      strategy.inputs[term] = Partial{kind};
      strategy.outputs[0] = Partial{kind};
      if (added) strategy.inputs[0] = Partial{kind};
      strategies.push_back(std::move(strategy));
    }
  }
  return choose(call, std::move(strategies));
}

const std::vector<ProductDim> kMatrix{{0, {}, 0}, {{}, 1, 1}, {1, 0, {}}};
const std::vector<ProductDim> kBatched{{0, 0, 0}, {1, {}, 1}, {{}, 2, 2}, {2, 1, {}}};
const std::vector<ProductDim> kMatrixVector{{0, {}, 0}, {1, 0, {}}};
const std::vector<ProductDim> kDot{{0, 0, {}}};

ShardingRule rule(const std::vector<ProductDim>& dims, bool added) {
  return [dims, added](const ShardingCall& call) { return product(call, dims, added); };
}

// With an empty inner dim, LibTorch 1.13 does not broadcast the tensor that the product is added to.
Sharding matrix_vector_plus(const ShardingCall& call) {
  Sharding sharding = product(call, kMatrixVector, true);
  if (call.traits.mutates || call.inputs[0].whole.shape == call.outputs[0].shape) return sharding;
  sharding.local = [](const LocalContext&, const c10::OperatorHandle& op, Stack* stack) {
    (*stack)[0] = (*stack)[0].toTensor().expand({(*stack)[1].toTensor().size(0)});
    op.callBoxed(stack);
  };
  return sharding;
}

}  // namespace

void add_matmul_rules(RuleTable& table) {
  table.add({"mm"}, rule(kMatrix, false));
  table.add({"bmm"}, rule(kBatched, false));
  table.add({"mv"}, rule(kMatrixVector, false));
  table.add({"dot", "vdot"}, rule(kDot, false));
  table.add({"addmm"}, rule(kMatrix, true));
  table.add({"baddbmm"}, rule(kBatched, true));
  table.add({"addmv"}, matrix_vector_plus);
}

}  // namespace penstock::detail
