#include "penstock/shard/trigger.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "penstock/base/errors.h"
#include "penstock/dtensor/dtensor.h"
#include "penstock/dtensor/dtensor_payload.h"
#include "penstock/shard/parameter_group.h"
#include "penstock/shard/registry.h"
#include "penstock/shard/shard_context.h"
#include "penstock/torch/any_operator_hook.h"
#include "penstock/torch/gradient_sink.h"
#include "penstock/torch/operator_traits.h"

namespace penstock {
namespace {

// A marked tensor among the arguments.
struct Use {
  detail::Membership member;
  at::Tensor tensor;
  bool written = false;
};
using Uses = c10::SmallVector<Use, 4>;

// These only ask about a tensor, make another handle of it, or another tensor that lies as it does: state of an optimizer.
constexpr std::array<std::string_view, 21> kHandleOperators{
    "aten::detach",       "aten::detach_",      "aten::alias",     "aten::requires_grad_", "aten::retain_grad", "aten::retains_grad", "aten::is_leaf",
    "aten::output_nr",    "aten::_version",     "aten::set_data",  "aten::data",           "aten::size.int",    "aten::stride.int",   "aten::is_same_size",
    "aten::empty_like",   "aten::zeros_like",   "aten::ones_like", "aten::full_like",      "aten::is_floating_point", "aten::is_complex", "aten::_has_compatible_shallow_copy_type"};

bool handles_only(const c10::OperatorHandle& op, const OperatorTraits& traits) {
  thread_local std::vector<signed char> known;
  const std::size_t index = operator_index(op);
  if (index >= known.size()) known.resize(index + 64, -1);
  if (known[index] < 0) known[index] = std::find(kHandleOperators.begin(), kHandleOperators.end(), traits.name) != kHandleOperators.end();
  return known[index] != 0;
}

// Whether a tensor beside the parameter can only be an activation.
bool is_activation(const at::Tensor& tensor, const Uses& uses) {
  if (tensor.dim() == 0) return false;
  const detail::DTensorPayload* payload = detail::dtensor_payload(tensor);
  if (!payload) return true;
  return std::none_of(uses.begin(), uses.end(), [&](const Use& use) {
    const detail::DTensorPayload* shard = detail::dtensor_payload(use.tensor);
    return shard && shard->spec->mesh_id() == payload->spec->mesh_id() && shard->spec->placements() == payload->spec->placements() && use.tensor.sizes() == tensor.sizes();
  });
}

[[noreturn]] void refuse_write(const Use& use, const OperatorTraits& traits) {
  const ParameterGroup& group = *use.member.group;
  const std::string name = use.member.parameter >= 0 ? group.parameters()[static_cast<std::size_t>(use.member.parameter)].to_string() : fmt::format("a part of '{}'", group.name());
  throw StateError(describe(fmt::format("{}: it writes {}", traits.name, name), "a gathered parameter, of which only the shards would count", "a sharded one",
                            "call ensure_sharded(parameters) before an optimizer steps, or write inside an UnshardedScope"));
}

// A detached handle of a shard that is to be computed with: the same handle of the gathered parameter.
at::Tensor gathered_handle(const Use& use) {
  const detail::DTensorPayload* payload = detail::dtensor_payload(use.tensor);
  if (!payload || use.member.parameter >= 0) return use.tensor;
  for (const ShardedParameter& p : use.member.group->parameters()) {
    const detail::DTensorPayload* shard = detail::dtensor_payload(p.sharded);
    if (payload->spec == shard->spec && payload->local().data_ptr() == shard->local().data_ptr()) return p.unsharded.detach();
  }
  // Not a handle of a shard: a tensor-parallel view of the gathered parameter.
  if (payload->local().storage().unsafeGetStorageImpl() == use.member.group->parameters().front().whole.storage().unsafeGetStorageImpl()) return use.tensor;
  throw StateError(describe("an activation met a view of a sharded parameter", describe_dtensor(use.tensor), "the parameter itself, or a view of the gathered one",
                            "take the view in the forward that uses it"));
}

void on_operator(const c10::OperatorHandle& op, Stack* stack) {
  const NoAnyHookGuard off;
  const OperatorTraits& traits = traits_of(op);
  if (handles_only(op, traits)) return op.callBoxed(stack);
  const std::size_t base = stack->size() - traits.arguments.size();
  Uses uses;
  for (std::size_t i = 0; i < traits.arguments.size(); ++i)
    if (traits.arguments[i].kind != ArgumentTraits::Kind::Other)
      for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
        if (!is_marked_for_any_hook(tensor)) return;
        if (const detail::Membership member = detail::find_member(tensor); member.group) uses.push_back({member, tensor, traits.arguments[i].written});
      });
  if (uses.empty()) return op.callBoxed(stack);

  const bool backward = in_backward();
  const bool recording = at::GradMode::is_enabled();
  bool compute = backward || recording || traits.pure_view;
  if (!compute)
    for (std::size_t i = 0; i < traits.arguments.size() && !compute; ++i)
      if (traits.arguments[i].kind != ArgumentTraits::Kind::Other)
        for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) { compute = compute || (!is_marked_for_any_hook(tensor) && is_activation(tensor, uses)); });
  if (!compute) {
    for (const Use& use : uses) {
      if (!use.written) continue;
      if (use.member.group->state() == GroupState::Unsharded && !use.member.group->writable()) refuse_write(use, traits);
      use.member.group->before_shards_change();
    }
    return op.callBoxed(stack);
  }

  for (const Use& use : uses) {
    use.member.group->context().before_use(*use.member.group);
    if (use.written && !use.member.group->writable()) refuse_write(use, traits);
  }
  bool handles = false;
  for (const Use& use : uses) handles = handles || (use.member.parameter < 0 && detail::dtensor_payload(use.tensor));
  if (handles)
    map_arguments(op, stack, [&](const at::Tensor& tensor) {
      for (const Use& use : uses)
        if (use.tensor.is_same(tensor)) return gathered_handle(use);
      return tensor;
    });

  const MixedPrecision& precision = uses[0].member.group->options().mixed_precision;
  if (!backward && precision.param_dtype && precision.cast_forward_inputs) {
    for (std::size_t i = 0; i < traits.arguments.size(); ++i) {
      if (traits.arguments[i].kind == ArgumentTraits::Kind::Other || traits.arguments[i].written) continue;
      c10::IValue& value = (*stack)[base + i];
      value = map_tensors(value, [&](const at::Tensor& tensor) {
        const bool cast = tensor.dim() > 0 && at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != *precision.param_dtype && !is_marked_for_any_hook(tensor);
        return cast ? tensor.to(*precision.param_dtype) : tensor;
      });
    }
  }
  if (!recording || backward) return op.callBoxed(stack);
  // The graph holds what is made here as soon as the operator has run.
  c10::SmallVector<AccumulatorPtr, 4> accumulators;
  for (const Use& use : uses)
    if (use.member.parameter >= 0 && use.tensor.requires_grad()) {
      const auto slot = static_cast<std::size_t>(use.member.parameter);
      use.member.group->note_use();
      accumulators.push_back(send_gradient_to(use.tensor, *use.member.group, slot));
    }
  op.callBoxed(stack);
}

}  // namespace

void install_trigger() { set_any_operator_hook(&on_operator); }

}  // namespace penstock
