// Reductions: dims that stay may be split; along a reduced dim, the local results are partial.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/strategy_builder.h"

namespace penstock::detail {
namespace {

// Which dims are reduced, and where the others are afterwards.
struct Reduction {
  explicit Reduction(const ShardingCall& call) : ndim(call.inputs[0].ndim()) {
    reduced = dims_of(call.has_argument("dim") ? call.argument("dim") : c10::IValue(), ndim);
    const bool keep = call.has_argument("keepdim") && call.argument("keepdim").isBool() &&
                      call.argument("keepdim").toBool();
    std::int64_t next = 0;
    for (std::int64_t dim = 0; dim < ndim; ++dim) {
      if (!reduced.count(dim)) place[dim] = next;
      if (keep || !reduced.count(dim)) ++next;
    }
  }
  std::int64_t ndim;
  std::set<std::int64_t> reduced;
  std::map<std::int64_t, std::int64_t> place;
};

void add_outer_dims(const ShardingCall& call, const Reduction& reduction,
                    std::vector<AxisStrategy>& strategies) {
  for (const auto& [dim, place] : reduction.place) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Shard{dim};
    for (Placement& placement : strategy.outputs) placement = Shard{place};
    strategies.push_back(std::move(strategy));
  }
}

void add_terms(const ShardingCall& call, const Reduction& reduction, std::vector<AxisStrategy>& strategies,
               PartialOp kind) {
  for (const std::int64_t dim : reduction.reduced) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Shard{dim};
    strategy.outputs[0] = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
}

void add_partial(const ShardingCall& call, std::vector<AxisStrategy>& strategies, PartialOp kind) {
  AxisStrategy strategy = replicated_strategy(call);
  strategy.inputs[0] = Partial{kind};
  strategy.outputs[0] = Partial{kind};
  strategies.push_back(std::move(strategy));
}

// Reduced dims may be split, and the result is whole: the local call reduces it.
void add_whole_results(const ShardingCall& call, const Reduction& reduction,
                       std::vector<AxisStrategy>& strategies) {
  for (const std::int64_t dim : reduction.reduced) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Shard{dim};
    strategies.push_back(std::move(strategy));
  }
}

bool splits_any(const Placements& placements, const std::set<std::int64_t>& dims) {
  return std::any_of(placements.begin(), placements.end(),
                     [&](const Placement& p) { return p.splits() && dims.count(p.dim()); });
}

// The reduced dims must be whole: the order of elements matters, or the result is not a plain reduction.
Sharding whole_rows(const ShardingCall& call) {
  std::vector<AxisStrategy> strategies;
  add_outer_dims(call, Reduction(call), strategies);
  return choose(call, std::move(strategies));
}

Sharding sum(const ShardingCall& call) {
  std::vector<AxisStrategy> strategies;
  const Reduction reduction(call);
  add_outer_dims(call, reduction, strategies);
  add_terms(call, reduction, strategies, PartialOp::Sum);
  for (const PartialOp kind : partial_kinds(call))
    if (c10::isFloatingType(call.inputs[0].whole.dtype) && (kind == PartialOp::Sum || kind == PartialOp::Avg))
      add_partial(call, strategies, kind);
  return choose(call, std::move(strategies));
}

// Shards may be uneven, so each rank sums and divides by the global count.
Sharding mean(const ShardingCall& call) {
  Sharding sharding = sum(call);
  const Reduction reduction(call);
  if (!splits_any(sharding.inputs[0], reduction.reduced)) return sharding;
  sharding.local = [](const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
    const Reduction reduction(context.call);
    std::int64_t count = 1;
    for (const std::int64_t dim : reduction.reduced) count *= context.call.inputs[0].size(dim);
    const bool keep = context.call.has_argument("keepdim") && context.call.argument("keepdim").toBool();
    const std::vector<std::int64_t> dims(reduction.reduced.begin(), reduction.reduced.end());
    // The sum of a half type may exceed its range where the mean does not.
    const at::ScalarType dtype = context.call.outputs[0].dtype;
    at::Tensor result = at::sum((*stack)[0].toTensor(), dims, keep, accumulation_type(dtype))
                            .div_(static_cast<double>(count))
                            .to(dtype);
    stack->clear();
    stack->push_back(std::move(result));
  };
  return sharding;
}

// Maximum or minimum. A rank without elements has the neutral value.
Sharding extreme(const ShardingCall& call, PartialOp kind) {
  std::vector<AxisStrategy> strategies;
  const Reduction reduction(call);
  add_outer_dims(call, reduction, strategies);
  if (call.inputs[0].whole.dtype != at::kBool) {
    add_terms(call, reduction, strategies, kind);
    for (const PartialOp present : partial_kinds(call))
      if (present == kind) add_partial(call, strategies, kind);
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (!splits_any(sharding.inputs[0], reduction.reduced)) return sharding;
  sharding.local = [kind](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
    const at::Tensor local = (*stack)[0].toTensor();
    if (local.numel() > 0) return op.callBoxed(stack);
    const auto shape = local_shape(context.call, context.call.outputs[0].shape, context.outputs[0]);
    stack->clear();
    stack->push_back(local.new_full(shape, kind == PartialOp::Max ? lowest_value(local.scalar_type())
                                                                  : highest_value(local.scalar_type())));
  };
  return sharding;
}

Sharding product_of_elements(const ShardingCall& call) {
  std::vector<AxisStrategy> strategies;
  const Reduction reduction(call);
  add_outer_dims(call, reduction, strategies);
  add_terms(call, reduction, strategies, PartialOp::Product);
  return choose(call, std::move(strategies));
}

// all and any: each rank's result, then all of them combined; the result is whole.
Sharding truth(const ShardingCall& call, bool any) {
  std::vector<AxisStrategy> strategies;
  const Reduction reduction(call);
  add_outer_dims(call, reduction, strategies);
  add_whole_results(call, reduction, strategies);
  Sharding sharding = choose(call, std::move(strategies));
  if (!splits_any(sharding.inputs[0], reduction.reduced)) return sharding;
  sharding.local = [any](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
    op.callBoxed(stack);
    const at::Tensor mine = stack->back().toTensor();
    const at::Tensor votes = mine.to(at::kInt).contiguous();
    for (const std::int64_t dim : Reduction(context.call).reduced)
      reduce_over(context.mesh, axes_splitting(context.inputs[0], dim), votes,
                  any ? comm::ReduceOp::Max : comm::ReduceOp::Min);
    stack->back() = votes.to(mine.scalar_type());
  };
  return sharding;
}

// `local` works on parts of the reduced dims.
Sharding by_hand(const ShardingCall& call, const LocalCall& local) {
  std::vector<AxisStrategy> strategies;
  const Reduction reduction(call);
  add_outer_dims(call, reduction, strategies);
  if (c10::isFloatingType(call.inputs[0].whole.dtype)) add_whole_results(call, reduction, strategies);
  Sharding sharding = choose(call, std::move(strategies));
  if (splits_any(sharding.inputs[0], reduction.reduced)) sharding.local = local;
  return sharding;
}

at::ScalarType wide_enough(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// The result of this rank, from one that still has the reduced dims.
at::Tensor as_output(const LocalContext& context, std::size_t output, const at::Tensor& kept) {
  return kept.reshape(local_shape(context.call, context.call.outputs[output].shape, context.outputs[output]))
      .to(context.call.outputs[output].dtype);
}

// Deviations from the global mean.
void spread_of_parts(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const Reduction reduction(context.call);
  const std::string& name = context.call.traits.name;
  const std::vector<std::int64_t> dims(reduction.reduced.begin(), reduction.reduced.end());
  const std::vector<int> axes = axes_splitting(context.inputs[0], reduction.reduced);
  const c10::IValue correction =
      (*stack)[static_cast<std::size_t>(context.call.argument_index("correction"))];
  double count = 1;
  for (const std::int64_t dim : dims) count *= static_cast<double>(context.call.inputs[0].size(dim));
  const at::Tensor values = (*stack)[0].toTensor().to(wide_enough((*stack)[0].toTensor().scalar_type()));
  const at::Tensor mean = values.sum(dims, true).contiguous();
  reduce_over(context.mesh, axes, mean, comm::ReduceOp::Sum);
  mean.div_(count);
  at::Tensor spread = (values - mean).square_().sum(dims, true).contiguous();
  reduce_over(context.mesh, axes, spread, comm::ReduceOp::Sum);
  spread.div_(std::max(0.0, count - (correction.isNone() ? 1.0 : correction.toScalar().toDouble())));
  if (name.find("::std") != std::string::npos) spread.sqrt_();
  stack->clear();
  stack->push_back(as_output(context, 0, spread));
  if (context.call.outputs.size() > 1) stack->push_back(as_output(context, 1, mean));
}

void logsumexp_of_parts(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const Reduction reduction(context.call);
  const std::vector<std::int64_t> dims(reduction.reduced.begin(), reduction.reduced.end());
  const std::vector<int> axes = axes_splitting(context.inputs[0], reduction.reduced);
  const at::Tensor values = (*stack)[0].toTensor().to(wide_enough((*stack)[0].toTensor().scalar_type()));
  std::vector<std::int64_t> shape = values.sizes().vec();
  for (const std::int64_t dim : dims) shape[static_cast<std::size_t>(dim)] = 1;
  at::Tensor largest = values.numel() > 0 ? values.amax(dims, true).contiguous()
                                          : values.new_full(shape, -std::numeric_limits<double>::infinity());
  reduce_over(context.mesh, axes, largest, comm::ReduceOp::Max);
  largest.masked_fill_(largest.abs() == std::numeric_limits<double>::infinity(), 0);
  at::Tensor sum = (values - largest).exp_().sum(dims, true).contiguous();
  reduce_over(context.mesh, axes, sum, comm::ReduceOp::Sum);
  stack->clear();
  stack->push_back(as_output(context, 0, sum.log_().add_(largest)));
}

}  // namespace

void add_reduction_rules(RuleTable& table) {
  table.add({"sum"}, sum);
  table.add({"mean"}, mean);
  table.add({"amax", "max"}, [](const ShardingCall& call) { return extreme(call, PartialOp::Max); });
  table.add({"amin", "min"}, [](const ShardingCall& call) { return extreme(call, PartialOp::Min); });
  table.add({"max.dim_max", "min.dim_min"}, whole_rows);
  table.add({"prod"}, product_of_elements);
  table.add({"any"}, [](const ShardingCall& call) { return truth(call, true); });
  table.add({"all"}, [](const ShardingCall& call) { return truth(call, false); });
  table.add({"var.correction", "std.correction", "var_mean.correction", "std_mean.correction"},
            [](const ShardingCall& call) { return by_hand(call, spread_of_parts); });
  table.add({"logsumexp"}, [](const ShardingCall& call) { return by_hand(call, logsumexp_of_parts); });
  table.add({"mode", "median.dim", "nanmedian.dim", "kthvalue", "aminmax", "count_nonzero"}, whole_rows);
  // Along `dim` in order; the shape is unchanged.
  table.add({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "msort"},
            [](const ShardingCall& call) {
              return choose(call,
                            independent_dims(call, dims_of(call.argument("dim"), call.inputs[0].ndim())));
            });
  table.add({"topk"}, [](const ShardingCall& call) {
    std::vector<AxisStrategy> strategies;
    const auto reduced = dims_of(call.argument("dim"), call.inputs[0].ndim());
    for (std::int64_t dim = 0; dim < call.inputs[0].ndim(); ++dim)
      if (!reduced.count(dim)) strategies.push_back({{Shard{dim}}, {Shard{dim}, Shard{dim}}});
    return choose(call, std::move(strategies));
  });
}

}  // namespace penstock::detail
