// Operators that move, add and remove whole dims: each remaining dim may be split, and partial values stay
// partial.
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

// Per dim of the input, its position in every output.
using DimMap = std::vector<std::optional<std::int64_t>>;

bool any_kind(PartialOp) { return true; }

// `linear`: which kinds of partial values stay partial.
Sharding mapped(const ShardingCall& call, const DimMap& map, bool (*linear)(PartialOp) = any_kind) {
  std::vector<AxisStrategy> strategies;
  for (std::size_t dim = 0; dim < map.size(); ++dim) {
    if (!map[dim]) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Shard{static_cast<std::int64_t>(dim)};
    for (Placement& placement : strategy.outputs) placement = Shard{*map[dim]};
    strategies.push_back(std::move(strategy));
  }
  for (const PartialOp kind : partial_kinds(call)) {
    if (!linear(kind)) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Partial{kind};
    for (Placement& placement : strategy.outputs) placement = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
  return choose(call, std::move(strategies));
}

DimMap identity(std::int64_t ndim) {
  DimMap map;
  for (std::int64_t dim = 0; dim < ndim; ++dim) map.push_back(dim);
  return map;
}

Sharding transpose(const ShardingCall& call) {
  const std::int64_t ndim = call.inputs[0].ndim();
  DimMap map = identity(ndim);
  std::int64_t a = 0, b = 1;
  if (call.has_argument("dim0")) {
    a = ShardingCall::wrap_dim(call.argument("dim0").toInt(), ndim);
    b = ShardingCall::wrap_dim(call.argument("dim1").toInt(), ndim);
  }
  if (ndim > 1) std::swap(map[static_cast<std::size_t>(a)], map[static_cast<std::size_t>(b)]);
  return mapped(call, map);
}

Sharding permute(const ShardingCall& call) {
  const std::int64_t ndim = call.inputs[0].ndim();
  DimMap map(static_cast<std::size_t>(ndim));
  const auto dims = call.argument("dims").toIntVector();
  for (std::size_t place = 0; place < dims.size(); ++place)
    map[static_cast<std::size_t>(ShardingCall::wrap_dim(dims[place], ndim))] =
        static_cast<std::int64_t>(place);
  return mapped(call, map);
}

Sharding unsqueeze(const ShardingCall& call) {
  const std::int64_t ndim = call.inputs[0].ndim();
  const std::int64_t added = ShardingCall::wrap_dim(call.argument("dim").toInt(), ndim + 1);
  DimMap map = identity(ndim);
  for (auto& place : map)
    if (*place >= added) ++*place;
  return mapped(call, map);
}

// The sizes given are those of the whole tensor.
Sharding expand(const ShardingCall& call) {
  const auto& shape = call.inputs[0].whole.shape;
  const auto& result = call.outputs[0].shape;
  const std::size_t added = result.size() - shape.size();
  DimMap map(shape.size());
  for (std::size_t dim = 0; dim < shape.size(); ++dim)
    if (shape[dim] == result[dim + added]) map[dim] = static_cast<std::int64_t>(dim + added);
  Sharding sharding = mapped(call, map);
  sharding.arguments = {
      {call.argument_index("size"), c10::IValue(local_shape(call, result, sharding.outputs[0]))}};
  return sharding;
}

// A dim that is cut, and one that is scanned in order, must be whole.
Sharding one_dim_whole(const ShardingCall& call, bool drops) {
  const std::int64_t ndim = call.inputs[0].ndim();
  if (ndim == 0) return mapped(call, {});
  const std::int64_t cut = ShardingCall::wrap_dim(
      call.argument(call.has_argument("dimension") ? "dimension" : "dim").toInt(), ndim);
  DimMap map = identity(ndim);
  for (auto& place : map)
    if (drops && *place > cut) --*place;
  map[static_cast<std::size_t>(cut)].reset();
  return mapped(call, map);
}

// The whole dim: nothing is cut.
Sharding slice(const ShardingCall& call) {
  if (call.outputs[0].shape != call.inputs[0].whole.shape) return one_dim_whole(call, false);
  return mapped(call, identity(call.inputs[0].ndim()));
}

// Complex numbers as pairs: sums of them are sums of the parts, products are not.
Sharding as_pairs(const ShardingCall& call) { return mapped(call, identity(call.inputs[0].ndim()), sums); }

// The last dim holds the real and imaginary parts.
Sharding from_pairs(const ShardingCall& call) {
  DimMap map = identity(call.inputs[0].ndim());
  map.back().reset();
  return mapped(call, map, sums);
}

// The halves of `dim` are combined elementwise, in the derivatives too; the result and its gradient have half
// of it.
Sharding halves(const ShardingCall& call) {
  const std::int64_t ndim = call.inputs.back().ndim();
  const std::int64_t cut = ShardingCall::wrap_dim(call.argument("dim").toInt(), ndim);
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < ndim; ++dim)
    if (dim != cut)
      strategies.push_back({std::vector<Placement>(call.inputs.size(), Shard{dim}), {Shard{dim}}});
  return choose(call, std::move(strategies));
}

// Dims in an int[] must be whole.
Sharding listed_dims_whole(const ShardingCall& call) {
  DimMap map = identity(call.inputs[0].ndim());
  for (const std::int64_t dim : dims_of(call.argument("dims"), call.inputs[0].ndim()))
    map[static_cast<std::size_t>(dim)].reset();
  return mapped(call, map);
}

// The last two dims are processed together.
Sharding matrices_whole(const ShardingCall& call) {
  DimMap map = identity(call.inputs[0].ndim());
  for (std::size_t i = 1; i <= 2 && i <= map.size(); ++i) map[map.size() - i].reset();
  return mapped(call, map);
}

Sharding diagonal(const ShardingCall& call) {
  const std::int64_t ndim = call.inputs[0].ndim();
  const std::int64_t a = ShardingCall::wrap_dim(call.argument("dim1").toInt(), ndim),
                     b = ShardingCall::wrap_dim(call.argument("dim2").toInt(), ndim);
  DimMap map(static_cast<std::size_t>(ndim));
  std::int64_t next = 0;
  for (std::int64_t dim = 0; dim < ndim; ++dim)
    if (dim != a && dim != b) map[static_cast<std::size_t>(dim)] = next++;
  return mapped(call, map);
}

Sharding repeat(const ShardingCall& call) {
  const auto& shape = call.inputs[0].whole.shape;
  const auto counts = call.argument("repeats").toIntVector();
  const std::size_t added = counts.size() - shape.size();
  DimMap map(shape.size());
  for (std::size_t dim = 0; dim < shape.size(); ++dim)
    if (counts[dim + added] == 1) map[dim] = static_cast<std::int64_t>(dim + added);
  return mapped(call, map);
}

Sharding pad(const ShardingCall& call) {
  const std::int64_t ndim = call.inputs[0].ndim();
  const auto widths = call.argument("pad").toIntVector();
  DimMap map = identity(ndim);
  for (std::size_t i = 0; i * 2 < widths.size(); ++i)
    if (widths[2 * i] != 0 || widths[2 * i + 1] != 0) map[static_cast<std::size_t>(ndim) - 1 - i].reset();
  // Zeros are valid in every kind of partial value; another value only if equal values reduce to themselves.
  const c10::Scalar value = call.argument("value").toScalar();
  const bool zero = !value.isComplex() && value.toDouble() == 0;
  Sharding sharding = mapped(
      call, map, zero ? any_kind : [](PartialOp kind) {
        return kind == PartialOp::Avg || kind == PartialOp::Max || kind == PartialOp::Min;
      });
  // LibTorch does not pad tensors without elements.
  sharding.local = [](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
    const at::Tensor local = (*stack)[0].toTensor();
    if (local.numel() > 0) return op.callBoxed(stack);
    stack->clear();
    stack->push_back(
        local.new_full(local_shape(context.call, context.call.outputs[0].shape, context.outputs[0]),
                       context.call.argument("value").toScalar()));
  };
  return sharding;
}

// Several tensors become one: the dim along which they are joined must be whole.
Sharding join(const ShardingCall& call, bool adds_dim) {
  const std::int64_t result_ndim = static_cast<std::int64_t>(call.outputs[0].shape.size());
  const std::int64_t joined = ShardingCall::wrap_dim(call.argument("dim").toInt(), result_ndim);
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < result_ndim; ++dim) {
    if (dim == joined) continue;
    AxisStrategy strategy = replicated_strategy(call);
    for (std::size_t i = 0; i < call.inputs.size(); ++i)
      // A tensor of shape (0) can be joined with anything.
      if (call.inputs[i].ndim() == result_ndim - (adds_dim ? 1 : 0))
        strategy.inputs[i] = Shard{dim - (adds_dim && dim > joined ? 1 : 0)};
    strategy.outputs[0] = Shard{dim};
    strategies.push_back(std::move(strategy));
  }
  for (const PartialOp kind : partial_kinds(call)) {
    AxisStrategy strategy = replicated_strategy(call);
    for (Placement& placement : strategy.inputs) placement = Partial{kind};
    strategy.outputs[0] = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
  return choose(call, std::move(strategies));
}

}  // namespace

void add_dim_rules(RuleTable& table) {
  table.add({"t", "transpose", "transpose_copy", "t_copy", "numpy_T", "mT", "adjoint"}, transpose);
  table.add({"permute", "permute_copy"}, permute);
  table.add({"unsqueeze", "unsqueeze_copy"}, unsqueeze);
  table.add({"expand", "expand_copy"}, expand);
  table.add({"select.int", "unbind.int", "select_copy.int"},
            [](const ShardingCall& call) { return one_dim_whole(call, true); });
  table.add({"split.Tensor", "split_with_sizes", "chunk", "unsafe_split.Tensor", "unsafe_split_with_sizes",
             "unsafe_chunk", "narrow", "unfold"},
            [](const ShardingCall& call) { return one_dim_whole(call, false); });
  table.add({"slice.Tensor", "slice_copy.Tensor"}, slice);
  table.add({"flip", "roll"}, listed_dims_whole);
  table.add({"tril", "triu"}, matrices_whole);
  table.add({"diagonal", "diagonal_copy"}, diagonal);
  table.add({"repeat"}, repeat);
  table.add({"cat", "_cat"}, [](const ShardingCall& call) { return join(call, false); });
  table.add({"stack", "_stack"}, [](const ShardingCall& call) { return join(call, true); });
  table.add({"view_as_real", "real", "imag"}, as_pairs);
  table.add({"view_as_complex"}, from_pairs);
  table.add({"glu", "glu_backward", "glu_jvp"}, halves);
  // Whether partial values stay partial depends on the value.
  table.add({"constant_pad_nd"}, pad, {.numbers_matter = true});
}

}  // namespace penstock::detail
