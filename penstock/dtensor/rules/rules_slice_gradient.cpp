// Gradients of slicing operators, and the operators that write a slice back: a gradient is written into zeros
// of the whole size, a part into a copy. Their size arguments are those of the whole tensor; each rank
// computes its own.
#include <ATen/ATen.h>

#include <optional>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

using Numbers = std::vector<std::int64_t>;
// Per dim of the slice, its position in the whole; std::nullopt where the whole is cut.
using DimMap = std::vector<std::optional<std::int64_t>>;

// The dims of the whole without those in `cut`, followed by `extra` dims of the slice.
DimMap uncut_dims(std::int64_t ndim, const Numbers& cut, bool keeps, std::size_t extra) {
  DimMap map;
  for (std::int64_t dim = 0; dim < ndim; ++dim) {
    const bool is_cut = std::find(cut.begin(), cut.end(), dim) != cut.end();
    if (!is_cut)
      map.push_back(dim);
    else if (keeps)
      map.push_back(std::nullopt);
  }
  map.insert(map.end(), extra, std::nullopt);
  return map;
}

// What the operator slices out of a tensor of `shape`, and how the dims of the slice correspond to it.
DimMap cut_out(const ShardingCall& call, const Numbers& shape, const Numbers& part) {
  const auto ndim = static_cast<std::int64_t>(shape.size());
  const auto dim = [&](const char* name) {
    return ShardingCall::wrap_dim(call.argument(name).toInt(), ndim);
  };
  const std::string& name = call.traits.name;
  if (name.find("diagonal") != std::string::npos)
    return uncut_dims(ndim, {dim("dim1"), dim("dim2")}, false, 1);
  if (name.find("unfold") != std::string::npos) return uncut_dims(ndim, {dim("dim")}, true, 1);
  if (name.find("select") != std::string::npos) return uncut_dims(ndim, {dim("dim")}, false, 0);
  return uncut_dims(ndim, part == shape ? Numbers{} : Numbers{dim("dim")}, true, 0);
}

// Zeros of the given size, with the gradient in its position.
Sharding gradient(const ShardingCall& call) {
  const Numbers& shape = call.outputs[0].shape;
  std::vector<AxisStrategy> strategies;
  const DimMap map = cut_out(call, shape, call.inputs[0].whole.shape);
  for (std::size_t dim = 0; dim < map.size(); ++dim) {
    if (!map[dim]) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Shard{static_cast<std::int64_t>(dim)};
    strategy.outputs[0] = Shard{*map[dim]};
    strategies.push_back(std::move(strategy));
  }
  // Overlapping windows are added up; otherwise zero is valid in every kind of partial value, but gradients
  // are only partial sums.
  for (const PartialOp kind : partial_kinds(call))
    if (kind == PartialOp::Sum || kind == PartialOp::Avg) {
      AxisStrategy strategy = replicated_strategy(call);
      strategy.inputs[0] = strategy.outputs[0] = Partial{kind};
      strategies.push_back(std::move(strategy));
    }
  Sharding sharding = choose(call, std::move(strategies));
  sharding.arguments = {
      {call.argument_index("input_sizes"), c10::IValue(local_shape(call, shape, sharding.outputs[0]))}};
  return sharding;
}

// self with the slice replaced by `src`.
Sharding write_back(const ShardingCall& call) {
  std::vector<AxisStrategy> strategies;
  const DimMap map = cut_out(call, call.inputs[0].whole.shape, call.inputs[1].whole.shape);
  for (std::size_t dim = 0; dim < map.size(); ++dim) {
    if (!map[dim]) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = strategy.outputs[0] = Shard{*map[dim]};
    strategy.inputs[1] = Shard{static_cast<std::int64_t>(dim)};
    strategies.push_back(std::move(strategy));
  }
  for (const PartialOp kind : partial_kinds(call)) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = strategy.inputs[1] = strategy.outputs[0] = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
  return choose(call, std::move(strategies));
}

// Sizes, strides and offset refer to the memory of the whole tensor.
Sharding strided_write_back(const ShardingCall& call) {
  Sharding sharding = replicate_all(call);
  sharding.local = [](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
    const GlobalGeometry& whole = context.call.inputs[0].whole;
    const at::Tensor self = (*stack)[0].toTensor();
    if (self.strides() != c10::IntArrayRef(whole.stride))
      (*stack)[0] = at::empty_strided(whole.shape, whole.stride, self.options()).copy_(self);
    op.callBoxed(stack);
  };
  return sharding;
}

}  // namespace

void add_slice_gradient_rules(RuleTable& table) {
  table.add({"select_backward", "slice_backward", "diagonal_backward", "unfold_backward"}, gradient);
  table.add({"select_scatter", "slice_scatter", "diagonal_scatter"}, write_back);
  table.add({"as_strided_scatter"}, strided_write_back);
}

}  // namespace penstock::detail
