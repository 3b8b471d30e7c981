// Losses.
//
// nll_loss: rows and classes may be split. Each rank looks up the targets whose class it holds; the sum and
// the total weight are added up over the ranks, so uneven rows and ignored targets are counted correctly.
// Together with log_softmax, whose classes may be split too, cross entropy over a split vocabulary sends a
// few numbers per row.
//
// Elementwise losses: partial sums if an input is split. The mean is over the elements of all ranks.
#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

#include <algorithm>

#include "penstock/dtensor/tensor/local_index.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/strategy_builder.h"
#include "penstock/operator_traits.h"

namespace penstock::detail {
namespace {

constexpr std::int64_t kNone = at::Reduction::None, kMean = at::Reduction::Mean, kSum = at::Reduction::Sum;

bool all_replicated(const Sharding& sharding) {
  return std::all_of(sharding.inputs.begin(), sharding.inputs.end(), [](const Placements& placements) {
    return std::all_of(placements.begin(), placements.end(),
                       [](const Placement& placement) { return placement.is_replicate(); });
  });
}

// ---- likelihood of classes: self (rows, classes, ...) or (classes), target without the dim of classes ----

std::int64_t class_dim(const ShardingCall& call) { return input_named(call, "self")->ndim() == 1 ? 0 : 1; }

// This rank's part of the targets: class positions and weights.
struct Lookup {
  Lookup(const LocalContext& context, const Stack& stack)
      : dim(class_dim(context.call)), self(local_argument(context, stack, "self")) {
    const at::Tensor target = local_argument(context, stack, "target"),
                     weight = local_argument(context, stack, "weight");
    const auto& shape = input_named(context.call, "self")->whole.shape;
    const std::int64_t ignored = context.call.argument("ignore_index").toInt();
    const at::Tensor counts = target.ne(ignored);
    check_indices(target, counts, shape[static_cast<std::size_t>(dim)], "nll_loss: a target");
    const LocalIndex found = find_held(target, held_segments(context, shape, decided(context, "self"), dim));
    const at::Tensor used = found.held.logical_and(counts);
    missing = used.logical_not();
    // An ignored target may be any number.
    position = found.position.masked_fill(missing, 0).unsqueeze(dim);
    type = accumulation_type(self.scalar_type());
    weights = weight.defined() && weight.numel() > 0
                  ? weight.to(type).take(position.squeeze(dim)).masked_fill_(missing, 0)
                  : used.to(type);
  }

  std::int64_t dim;
  at::Tensor self, missing, position, weights;
  at::ScalarType type;
};

// Output and total weight.
void local_likelihood(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const Lookup lookup(context, *stack);
  const std::int64_t reduction = context.call.argument("reduction").toInt();
  const at::ScalarType dtype = context.call.outputs[0].dtype;
  at::Tensor losses = lookup.self.new_zeros(lookup.missing.sizes(), lookup.self.options().dtype(lookup.type));
  if (lookup.self.size(lookup.dim) > 0)
    losses = lookup.self.gather(lookup.dim, lookup.position)
                 .squeeze(lookup.dim)
                 .to(lookup.type)
                 .neg_()
                 .mul_(lookup.weights)
                 .masked_fill_(lookup.missing, 0);
  const auto class_axes = axes_of(context, "self", lookup.dim);
  if (reduction == kNone) {
    losses = losses.contiguous();
    reduce_over(context.mesh, class_axes, losses, comm::ReduceOp::Sum);
    return store_results(context, stack,
                         {losses.to(dtype), losses.new_zeros({}, losses.options().dtype(dtype))});
  }
  const at::Tensor totals = at::stack({losses.sum(), lookup.weights.sum()});
  std::vector<int> axes;
  const Placements placements = decided(context, "self");
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (placements[axis].splits()) axes.push_back(static_cast<int>(axis));
  reduce_over(context.mesh, axes, totals, comm::ReduceOp::Sum);
  const at::Tensor total_weight = totals.select(0, 1).clone();
  const at::Tensor loss =
      reduction == kMean ? totals.select(0, 0) / total_weight : totals.select(0, 0).clone();
  store_results(context, stack, {loss.to(dtype), total_weight.to(context.call.outputs[1].dtype)});
}

void local_likelihood_backward(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const Lookup lookup(context, *stack);
  at::Tensor gradient = local_argument(context, *stack, "grad_output").to(lookup.type);
  if (context.call.argument("reduction").toInt() == kMean)
    gradient = gradient / local_argument(context, *stack, "total_weight").to(lookup.type);
  const at::Tensor values = (lookup.weights * gradient).neg_().masked_fill_(lookup.missing, 0);
  at::Tensor result = lookup.self.new_zeros(lookup.self.sizes());
  if (lookup.self.size(lookup.dim) > 0)
    result.scatter_(lookup.dim, lookup.position, values.to(result.scalar_type()).unsqueeze(lookup.dim));
  store_results(context, stack, {result});
}

Sharding likelihood(const ShardingCall& call, bool backward) {
  const std::int64_t classes = class_dim(call), ndim = input_named(call, "self")->ndim();
  const bool by_row = call.argument("reduction").toInt() == kNone;
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < ndim; ++dim) {
    StrategyBuilder strategy(call);
    strategy.in("self", Shard{dim});
    if (backward) strategy.out(0, Shard{dim});
    if (dim == classes) {
      strategy.in("weight", Shard{0});
    } else {
      const std::int64_t row = dim > classes ? dim - 1 : dim;
      strategy.in("target", Shard{row});
      if (by_row) strategy.in("grad_output", Shard{row});
      if (by_row && !backward) strategy.out(0, Shard{row});
    }
    strategy.add_to(strategies);
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (!all_replicated(sharding)) sharding.local = backward ? local_likelihood_backward : local_likelihood;
  return sharding;
}

// ---- elementwise ----

std::vector<std::int64_t> broadcast_shape(const ShardingCall& call) {
  std::vector<std::int64_t> result;
  for (const ShardingInput& input : call.inputs) {
    if (input.written) continue;
    const auto& shape = input.whole.shape;
    if (shape.size() > result.size()) result.insert(result.begin(), shape.size() - result.size(), 1);
    for (std::size_t i = 0; i < shape.size(); ++i)
      if (std::int64_t& size = result[result.size() - shape.size() + i]; size == 1) size = shape[i];
  }
  return result;
}

std::int64_t product(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

Sharding by_element(const ShardingCall& call) {
  const std::int64_t reduction = call.argument("reduction").toInt();
  if (reduction == kNone) return choose(call, elementwise_strategies(call));
  // A partial sum cannot be written into a replicated tensor.
  if (call.traits.mutates) return replicate_all(call);
  const auto shape = broadcast_shape(call);
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(shape.size()); ++dim) {
    if (shape[static_cast<std::size_t>(dim)] == 1) continue;
    AxisStrategy strategy = replicated_strategy(call);
    for (std::size_t i = 0; i < call.inputs.size(); ++i)
      if (const auto own = broadcast_dim(call.inputs[i].whole.shape, dim, shape))
        strategy.inputs[i] = Shard{*own};
    strategy.outputs[0] = Partial{};
    strategies.push_back(std::move(strategy));
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (all_replicated(sharding)) return sharding;
  const double scale = reduction == kMean ? static_cast<double>(product(shape)) : 1;
  sharding.local = [scale](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
    (*stack)[static_cast<std::size_t>(context.call.argument_index("reduction"))] = kNone;
    op.callBoxed(stack);
    const at::Tensor losses = stack->back().toTensor();
    stack->clear();
    stack->emplace_back(
        losses.sum(accumulation_type(losses.scalar_type())).div_(scale).to(losses.scalar_type()));
  };
  return sharding;
}

// The kernel would divide by its local count; so it computes the sum, which is divided here by the count of
// all ranks.
Sharding by_element_backward(const ShardingCall& call) {
  Sharding sharding = choose(call, elementwise_strategies(call));
  if (call.argument("reduction").toInt() != kMean || all_replicated(sharding)) return sharding;
  const double count = static_cast<double>(call.outputs[0].numel());
  sharding.local = [count](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
    (*stack)[static_cast<std::size_t>(context.call.argument_index("reduction"))] = kSum;
    // In a half type, gradients that are not divided yet may exceed the range.
    const at::ScalarType dtype = context.call.outputs[0].dtype, wide = accumulation_type(dtype);
    const bool widens = wide != dtype && !context.call.traits.mutates;
    if (widens)
      for (c10::IValue& value : *stack)
        value = map_tensors(value, [&](const at::Tensor& tensor) {
          return tensor.scalar_type() == dtype ? tensor.to(wide) : tensor;
        });
    op.callBoxed(stack);
    stack->back().toTensor().div_(count);
    if (widens) stack->back() = stack->back().toTensor().to(dtype);
  };
  return sharding;
}

}  // namespace

void add_loss_rules(RuleTable& table) {
  table.add({"nll_loss_forward", "nll_loss2d_forward"},
            [](const ShardingCall& call) { return likelihood(call, false); });
  table.add({"nll_loss_backward", "nll_loss2d_backward"},
            [](const ShardingCall& call) { return likelihood(call, true); });
  table.add({"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
             "binary_cross_entropy_with_logits", "soft_margin_loss"},
            by_element);
  table.add({"mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
             "binary_cross_entropy_backward", "soft_margin_loss_backward"},
            by_element_backward);
}

}  // namespace penstock::detail
