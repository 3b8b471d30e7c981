// Tensors created like another one: its values do not matter; its placements are used if they are valid.
#include <ATen/ATen.h>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/spec.h"

namespace penstock::detail {
namespace {

// With a given size: placed like the model tensor if the shape is the same, otherwise replicated.
Sharding sized(const ShardingCall& call) {
  Sharding sharding;
  if (call.outputs[0].shape == call.inputs[0].whole.shape) {
    sharding = placed_like_first_input(call);
  } else {
    sharding.inputs = {call.inputs[0].placements};
    sharding.outputs = {Placements(call.axes())};
  }
  const auto shape = local_shape(call, call.outputs[0].shape, sharding.outputs[0]);
  sharding.arguments.push_back({call.argument_index("size"), c10::IValue(shape)});
  if (call.has_argument("stride"))
    sharding.arguments.push_back(
        {call.argument_index("stride"), c10::IValue(dense_stride(shape, call.outputs[0].stride))});
  return sharding;
}

}  // namespace

void add_factory_rules(RuleTable& table) {
  table.add({"empty_like", "zeros_like", "ones_like", "full_like"}, placed_like_first_input);
  table.add({"new_empty", "new_zeros", "new_empty_strided", "new_ones", "new_full"}, sized);
  // A number read from a tensor: from the whole one, the same on every rank.
  table.add({"_local_scalar_dense", "equal", "is_nonzero"}, replicate_all,
            {.numbers_matter = false, .shape_known = false});
}

}  // namespace penstock::detail
