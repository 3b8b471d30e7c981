// Tensors made after the model of another: the values of the model do not matter, its layout is taken over where it fits.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "penstock/dtensor/rule_helpers.h"
#include "penstock/dtensor/rule_registry.h"

namespace penstock::detail {
namespace {

// Same shape: split alike. The model of terms gives a whole tensor: whatever is written into it later counts once.
Sharding like(const ShardingCall& call) {
  auto strategies = elementwise_strategies(call);
  for (const PartialOp kind : partial_kinds(call)) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
  return choose(call, std::move(strategies));
}

// Strides of a dense tensor of `shape` whose dims lie in memory in the order that `stride` says.
std::vector<std::int64_t> dense_stride(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& stride) {
  std::vector<std::size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return stride[a] > stride[b]; });
  std::vector<std::int64_t> result(shape.size());
  std::int64_t next = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    result[order[i]] = next;
    next *= std::max<std::int64_t>(shape[order[i]], 1);
  }
  return result;
}

// Of a given size: laid out as the model where the shape is the same, else whole on every rank.
Sharding sized(const ShardingCall& call) {
  Sharding sharding;
  if (call.outputs[0].shape == call.inputs[0].whole.shape) {
    sharding = like(call);
  } else {
    sharding.inputs = {call.inputs[0].placements};
    sharding.outputs = {Placements(call.axes())};
  }
  const auto shape = local_shape(call, call.outputs[0].shape, sharding.outputs[0]);
  sharding.arguments.push_back({call.argument_index("size"), c10::IValue(shape)});
  if (call.has_argument("stride"))
    sharding.arguments.push_back({call.argument_index("stride"), c10::IValue(dense_stride(shape, call.outputs[0].stride))});
  return sharding;
}

}  // namespace

void add_factory_rules(RuleTable& table) {
  table.add({"empty_like", "zeros_like", "ones_like", "full_like"}, like);
  table.add({"new_empty", "new_zeros", "new_empty_strided", "new_ones", "new_full"}, sized);
  // A number out of a tensor: of the whole one, the same on every rank.
  table.add({"_local_scalar_dense", "equal", "is_nonzero"}, replicate_all, {.numbers_matter = false, .shape_known = false});
}

}  // namespace penstock::detail
