// Reading and writing by an index along one dim: gather, scatter, index_select, index_add and related
// operators.
//
// Every other dim may be split. Along the indexed dim a rank that holds a part reads what it has (zero for
// the rest: the results are partial sums) and writes what belongs to it; if the index is split, so is the
// result.
#include <ATen/ATen.h>

#include <algorithm>

#include "penstock/dtensor/tensor/local_index.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

// Shared by the operators of this family.
struct IndexedCall {
  explicit IndexedCall(const ShardingCall& call)
      : self(static_cast<std::size_t>(call.index_at(call.argument_index("self")))),
        index_argument(call.argument_index("index")),
        index(static_cast<std::size_t>(call.index_at(index_argument))),
        ndim(call.inputs[self].ndim()),
        dim(ShardingCall::wrap_dim(call.argument("dim").toInt(), ndim)) {
    for (const char* name : {"src", "source"})
      if (call.has_argument(name)) source = call.index_at(call.argument_index(name));
  }
  std::size_t self;
  int index_argument;
  std::size_t index;
  int source = -1;  // -1: a scalar instead
  std::int64_t ndim, dim;
};

void set(std::vector<Placement>& placements, int at, const Placement& placement) {
  if (at >= 0) placements[static_cast<std::size_t>(at)] = placement;
}

// ---- reading ----

// Zero where another rank holds the element.
void read_held(const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
  const IndexedCall indexed(context.call);
  const at::Tensor self = (*stack)[0].toTensor();
  c10::IValue& index = (*stack)[static_cast<std::size_t>(indexed.index_argument)];
  const LocalIndex local =
      local_index(context.call, index.toTensor(), context.call.inputs[indexed.self].whole.shape,
                  context.inputs[indexed.self], indexed.dim);
  if (local.length == 0) {
    at::Tensor nothing =
        self.new_zeros(local_shape(context.call, context.call.outputs[0].shape, context.outputs[0]));
    stack->clear();
    stack->push_back(std::move(nothing));
    return;
  }
  index = local.position_or(0);
  op.callBoxed(stack);
  const at::Tensor result = stack->back().toTensor();
  at::Tensor missing = local.held.logical_not();
  if (missing.dim() < result.dim() || context.call.traits.name.find("index_select") != std::string::npos) {
    // One index per whole slice.
    std::vector<std::int64_t> shape(static_cast<std::size_t>(result.dim()), 1);
    if (!shape.empty()) shape[static_cast<std::size_t>(indexed.dim)] = missing.numel();
    missing = missing.reshape(shape);
  }
  stack->back() = result.masked_fill(missing, 0);
}

Sharding read(const ShardingCall& call, std::vector<AxisStrategy> strategies) {
  const IndexedCall indexed(call);
  if (indexed.ndim > 0 && call.inputs[indexed.self].whole.dtype != at::kBool) {
    AxisStrategy held = replicated_strategy(call);
    held.inputs[indexed.self] = Shard{indexed.dim};
    held.outputs[0] = Partial{};
    strategies.push_back(std::move(held));
  }
  for (const PartialOp kind : partial_kinds(call)) {
    AxisStrategy terms = replicated_strategy(call);
    terms.inputs[indexed.self] = Partial{kind};
    terms.outputs[0] = Partial{kind};
    strategies.push_back(std::move(terms));
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (splits_dim(sharding.inputs[indexed.self], indexed.dim)) sharding.local = read_held;
  return sharding;
}

// result[i][j] = self[index[i][j]][j] for dim 0; the result has the shape of the index.
Sharding gather(const ShardingCall& call) {
  const IndexedCall indexed(call);
  const auto& self = call.inputs[indexed.self].whole.shape;
  const auto& shape = call.inputs[indexed.index].whole.shape;
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < indexed.ndim && shape.size() == self.size(); ++dim) {
    const auto at = static_cast<std::size_t>(dim);
    if (dim != indexed.dim && shape[at] != self[at]) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[indexed.index] = strategy.outputs[0] = Shard{dim};
    if (dim != indexed.dim) strategy.inputs[indexed.self] = Shard{dim};
    strategies.push_back(std::move(strategy));
  }
  return read(call, std::move(strategies));
}

// Slices of dim `dim` in the order of a list of indices.
Sharding index_select(const ShardingCall& call) {
  const IndexedCall indexed(call);
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < indexed.ndim; ++dim) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.outputs[0] = Shard{dim};
    if (dim != indexed.dim)
      strategy.inputs[indexed.self] = Shard{dim};
    else if (call.inputs[indexed.index].ndim() == 1)
      strategy.inputs[indexed.index] = Shard{0};
    else
      continue;
    strategies.push_back(std::move(strategy));
  }
  return read(call, std::move(strategies));
}

// ---- writing ----

// Writes into the part of this rank, with one extra slice for what belongs to other ranks.
void write_held(const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
  const IndexedCall indexed(context.call);
  const at::Tensor self = (*stack)[0].toTensor();
  c10::IValue& index = (*stack)[static_cast<std::size_t>(indexed.index_argument)];
  const LocalIndex local =
      local_index(context.call, index.toTensor(), context.call.inputs[indexed.self].whole.shape,
                  context.inputs[indexed.self], indexed.dim);
  std::vector<std::int64_t> slice = self.sizes().vec();
  slice[static_cast<std::size_t>(indexed.dim)] = 1;
  index = local.position_or(local.length);
  (*stack)[0] = at::cat({self, self.new_zeros(slice)}, indexed.dim);
  op.callBoxed(stack);
  const at::Tensor written = stack->back().toTensor().narrow(indexed.dim, 0, local.length);
  if (context.call.inputs[indexed.self].written) {
    self.copy_(written);
    stack->back() = self;
  } else {
    stack->back() = written.contiguous();
  }
}

bool any_partial(PartialOp) { return true; }
bool no_kind(PartialOp) { return false; }

// `linear`: the kind of partial value that self and source may be.
Sharding write(const ShardingCall& call, std::vector<AxisStrategy> strategies, bool (*linear)(PartialOp)) {
  const IndexedCall indexed(call);
  if (indexed.ndim > 0) {
    AxisStrategy held = replicated_strategy(call);
    held.inputs[indexed.self] = held.outputs[0] = Shard{indexed.dim};
    strategies.push_back(std::move(held));
  }
  // A scalar cannot be partial.
  if (indexed.source >= 0)
    for (const PartialOp kind : partial_kinds(call)) {
      if (!linear(kind)) continue;
      AxisStrategy terms = replicated_strategy(call);
      terms.inputs[indexed.self] = terms.outputs[0] = Partial{kind};
      set(terms.inputs, indexed.source, Partial{kind});
      strategies.push_back(std::move(terms));
    }
  Sharding sharding = choose(call, std::move(strategies));
  if (splits_dim(sharding.inputs[indexed.self], indexed.dim)) sharding.local = write_held;
  return sharding;
}

// self[index[i][j]][j] (op)= src[i][j] for dim 0.
Sharding scatter(const ShardingCall& call) {
  const IndexedCall indexed(call);
  const bool adds = call.traits.name.find("scatter_add") != std::string::npos;
  const auto& self = call.inputs[indexed.self].whole.shape;
  const auto& shape = call.inputs[indexed.index].whole.shape;
  const auto* source =
      indexed.source >= 0 ? &call.inputs[static_cast<std::size_t>(indexed.source)].whole.shape : nullptr;
  // Reductions other than a plain write or sum cannot be applied to partial values.
  const bool reduces = call.has_argument("reduce");
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < indexed.ndim && shape.size() == self.size(); ++dim) {
    const auto at = static_cast<std::size_t>(dim);
    if (source && (source->size() != shape.size() || (*source)[at] != shape[at])) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[indexed.index] = Shard{dim};
    set(strategy.inputs, indexed.source, Shard{dim});
    if (dim != indexed.dim && shape[at] == self[at])
      strategy.inputs[indexed.self] = strategy.outputs[0] = Shard{dim};
    else if (adds && dim == indexed.dim)
      strategy.inputs[indexed.self] = strategy.outputs[0] = Partial{};
    else
      continue;
    strategies.push_back(std::move(strategy));
  }
  return write(call, std::move(strategies), reduces ? no_kind : adds ? sums : any_partial);
}

// Whole slices: self[index[i]] (op)= source[i] for dim 0.
Sharding index_write(const ShardingCall& call) {
  const IndexedCall indexed(call);
  const bool adds = call.traits.name.find("index_add") != std::string::npos;
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < indexed.ndim; ++dim) {
    AxisStrategy strategy = replicated_strategy(call);
    if (dim == indexed.dim) {
      if (!adds || call.inputs[indexed.index].ndim() != 1) continue;
      strategy.inputs[indexed.index] = Shard{0};
      strategy.inputs[indexed.self] = strategy.outputs[0] = Partial{};
    } else {
      strategy.inputs[indexed.self] = strategy.outputs[0] = Shard{dim};
    }
    if (indexed.source >= 0) {
      // A single slice may be given without its dim.
      if (call.inputs[static_cast<std::size_t>(indexed.source)].ndim() != indexed.ndim) continue;
      set(strategy.inputs, indexed.source, Shard{dim});
    }
    strategies.push_back(std::move(strategy));
  }
  return write(call, std::move(strategies), adds ? sums : any_partial);
}

// ---- others ----

// Indexes the flattened tensor: it must be whole, the indices need not.
Sharding take(const ShardingCall& call) {
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < call.inputs[1].ndim(); ++dim)
    strategies.push_back({{Replicate{}, Shard{dim}}, {Shard{dim}}});
  for (const PartialOp kind : partial_kinds(call))
    strategies.push_back({{Partial{kind}, Replicate{}}, {Partial{kind}}});
  return choose(call, std::move(strategies));
}

Sharding trace(const ShardingCall& call) {
  std::vector<AxisStrategy> strategies;
  for (const PartialOp kind : partial_kinds(call))
    if (sums(kind) && c10::isFloatingType(call.inputs[0].whole.dtype))
      strategies.push_back({{Partial{kind}}, {Partial{kind}}});
  return choose(call, std::move(strategies));
}

}  // namespace

void add_index_rules(RuleTable& table) {
  table.add({"gather"}, gather);
  table.add({"scatter", "scatter_add", "scatter_reduce"}, scatter);
  table.add({"index_select"}, index_select);
  table.add({"index_add", "index_copy", "index_fill"}, index_write);
  table.add({"take"}, take);
  table.add({"put", "masked_scatter", "masked_scatter_backward"}, replicate_all);
  table.add({"trace"}, trace);
  table.add({"nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
             "bincount", "repeat_interleave.Tensor"},
            [](const ShardingCall& call) -> Sharding { refuse_unknown_shape(call.traits); },
            {.numbers_matter = false, .shape_known = false});
}

}  // namespace penstock::detail
