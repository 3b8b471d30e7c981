#include "penstock/shard/state/trigger.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string_view>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"
#include "penstock/operator_traits.h"
#include "penstock/shard/state/registry.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/shard_group.h"
#include "penstock/step_context.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/any_operator_hook.h"
#include "penstock/torch/dispatch/gradient_sink.h"

namespace penstock {
namespace {

// A marked tensor among the arguments.
struct Use {
  detail::Membership member;
  at::Tensor tensor;
  bool written = false;
};
using Uses = c10::SmallVector<Use, 4>;

// These only query a tensor, create another handle of it, or create another tensor with its layout, such as
// optimizer state.
constexpr std::array<std::string_view, 20> kHandleOperators{"aten::detach",
                                                            "aten::detach_",
                                                            "aten::alias",
                                                            "aten::requires_grad_",
                                                            "aten::retain_grad",
                                                            "aten::retains_grad",
                                                            "aten::is_leaf",
                                                            "aten::output_nr",
                                                            "aten::_version",
                                                            "aten::set_data",
                                                            "aten::data",
                                                            "aten::size.int",
                                                            "aten::stride.int",
                                                            "aten::is_same_size",
                                                            "aten::empty_like",
                                                            "aten::zeros_like",
                                                            "aten::ones_like",
                                                            "aten::full_like",
                                                            "aten::is_floating_point",
                                                            "aten::is_complex"};

// The check that set_data, which is not an operator, makes before it replaces the data of its first argument
// by that of the second.
constexpr std::string_view kBeforeSetData = "aten::_has_compatible_shallow_copy_type";

// How torch::load writes values into a parameter.
constexpr std::string_view kSet = "aten::set_.source_Tensor";

enum class Role : signed char { Unknown, Computes, Casts, Handles, Replaces, Sets };

Role role_of(const c10::OperatorHandle& op, const OperatorTraits& traits) {
  thread_local std::vector<Role> known;
  const std::size_t index = operator_index(op);
  if (index >= known.size()) known.resize(index + 64, Role::Unknown);
  if (known[index] == Role::Unknown) {
    const bool handles =
        std::find(kHandleOperators.begin(), kHandleOperators.end(), traits.name) != kHandleOperators.end();
    known[index] = traits.name == kBeforeSetData          ? Role::Replaces
                   : traits.name == kSet                  ? Role::Sets
                   : handles                              ? Role::Handles
                   : traits.name.starts_with("aten::to.") ? Role::Casts
                                                          : Role::Computes;
  }
  return known[index];
}

// The dtype requested by one of the `to` operators.
std::optional<at::ScalarType> requested_dtype(const c10::OperatorHandle& op, const Stack& stack,
                                              std::size_t base) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[base + i];
    if (arguments[i].name() == "dtype" && !value.isNone()) return value.toScalarType();
    if (arguments[i].name() == "other") return value.toTensor().scalar_type();
  }
  return std::nullopt;
}

// The mark is copied to the data that set_data puts into the parameter, so that the next use is intercepted.
void note_replacement(const at::Tensor& self, const at::Tensor& data) {
  const detail::Membership member = detail::find_parameter(self);
  if (!member.group || !member.group->materialized()) return;
  member.group->note_replaced(static_cast<std::size_t>(member.parameter), data);
  mark_for_any_hook(data);
}

void adopt_replacements(const OperatorTraits& traits, const Stack& stack, std::size_t base) {
  for (std::size_t i = 0; i < traits.arguments.size(); ++i)
    if (traits.arguments[i].kind != ArgumentTraits::Kind::Other)
      for_each_tensor(stack[base + i], [&](const at::Tensor& tensor) {
        const detail::Membership member = detail::find_parameter(tensor);
        if (member.group && member.group->is_replaced(static_cast<std::size_t>(member.parameter)))
          member.group->adopt_replaced();
      });
}

// Whether a tensor besides the parameter can only be an activation.
bool is_activation(const at::Tensor& tensor, const Uses& uses) {
  if (tensor.dim() == 0) return false;
  const detail::DTensorPayload* payload = detail::dtensor_payload(tensor);
  if (!payload) return true;
  return std::none_of(uses.begin(), uses.end(), [&](const Use& use) {
    const detail::DTensorPayload* shard = detail::dtensor_payload(use.tensor);
    return shard && shard->spec->mesh_id() == payload->spec->mesh_id() &&
           shard->spec->placements() == payload->spec->placements() && use.tensor.sizes() == tensor.sizes();
  });
}

[[noreturn]] void refuse_write(const Use& use, const OperatorTraits& traits) {
  const ShardGroup& group = *use.member.group;
  const std::string name =
      use.member.parameter >= 0
          ? group.parameters()[static_cast<std::size_t>(use.member.parameter)].to_string()
          : fmt::format("a part of '{}'", group.name());
  throw StateError(describe(
      fmt::format("{}: it writes {}", traits.name, name),
      "a gathered parameter, whose shards would not change", "a sharded one",
      "call ensure_sharded(parameters) before an optimizer steps, or write inside an UnshardedScope"));
}

// For a detached handle of a shard that takes part in computation: the same handle of the gathered parameter.
at::Tensor gathered_handle(const Use& use) {
  const detail::DTensorPayload* payload = detail::dtensor_payload(use.tensor);
  if (!payload || use.member.parameter >= 0) return use.tensor;
  const bool trial = use.member.group->in_trial();
  for (const ShardedParameter& p : use.member.group->parameters()) {
    const detail::DTensorPayload* shard = detail::dtensor_payload(p.sharded);
    if (payload->spec != shard->spec || is_wrapper(payload->local()) ||
        payload->local().data_ptr() != shard->local().data_ptr())
      continue;
    return trial ? p.parameter().detach() : p.unsharded.detach();
  }
  if (trial) return use.tensor;
  // Not a handle of a shard but a tensor-parallel view of the gathered parameter.
  if (payload->local().storage().unsafeGetStorageImpl() ==
      use.member.group->parameters().front().whole.storage().unsafeGetStorageImpl())
    return use.tensor;
  throw StateError(describe(
      "an operator takes an activation and a view of a sharded parameter", describe_dtensor(use.tensor),
      "the parameter itself, or a view of the gathered one", "create the view in the forward that uses it"));
}

[[noreturn]] void refuse_stale(const Use& use, const OperatorTraits& traits) {
  throw StateError(
      describe(fmt::format("{}: it uses a tensor saved from a gathered parameter of '{}'", traits.name,
                           use.member.group->name()),
               "the dtype of the parameters has changed since", "the dtype of the forward that saved it",
               "run backward before Module::to or set_data change the dtype of sharded parameters"));
}

// Whether a tensor cannot be combined with results derived from shards.
bool cannot_combine(const at::Tensor& tensor, const Uses& derived) {
  if (tensor.dim() == 0) return false;
  const detail::DTensorPayload* payload = detail::dtensor_payload(tensor);
  return !payload || std::any_of(derived.begin(), derived.end(), [&](const Use& use) {
    return detail::dtensor_payload(use.tensor)->spec->mesh_id() != payload->spec->mesh_id();
  });
}

// A result derived from shards, as the same computation on gathered parameters would have produced it.
// [collective]
at::Tensor gathered_result(const Use& use) {
  const Placements& placements = placements_of(use.tensor);
  for (const ShardedParameter& p : use.member.group->parameters()) {
    const ParameterPlacement& placed = p.placement;
    if (placed.sharded->mesh_id() != detail::dtensor_payload(use.tensor)->spec->mesh_id()) continue;
    if (!placed.original) return full_tensor(use.tensor);
    Placements wanted = placements;
    if (!placed.data_axes.empty()) {
      for (const int axis : placed.data_axes) wanted[static_cast<std::size_t>(axis)] = Replicate{};
      return redistribute(use.tensor, wanted);
    }
    // The joint mesh consists of the data-parallel axes, then the parameter's own.
    const auto first = static_cast<std::ptrdiff_t>(use.member.group->mesh().mesh().shape().size());
    std::fill(wanted.begin(), wanted.begin() + first, Placement(Replicate{}));
    const at::Tensor whole = redistribute(use.tensor, wanted);
    return from_local(to_local(whole), *placed.original_mesh,
                      Placements(wanted.begin() + first, wanted.end()),
                      {.shape = whole.sizes().vec(), .stride = whole.strides().vec(), .check = false});
  }
  throw StateError(describe(
      "an operator takes an activation and a tensor computed from shards", describe_dtensor(use.tensor),
      fmt::format("a tensor on the mesh of a parameter of '{}'", use.member.group->name()),
      "compute it inside a forward that records gradients, or in an UnshardedScope"));
}

// Turns a tensor computed from shards into the whole value, for every handle to it, because an operator with
// an activation is about to write it. [collective]
void gather_in_place(const Use& use, const OperatorTraits& traits) {
  if (detail::dtensor_payload(use.tensor)->local().storage().use_count() > 1)
    throw StateError(describe(
        fmt::format("{}: it takes an activation and writes a tensor computed from shards", traits.name),
        "a tensor that shares memory with another one (a view, detach()), which would not change",
        "one with its own memory", "use the out-of-place form of the operator"));
  replace_data(use.tensor, gathered_result(use));
}

// Whether the operator updates the running statistics it takes, which no schema declares as written.
bool updates_statistics(const c10::OperatorHandle& op, const Stack& stack, std::size_t base) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "training" || arguments[i].name() == "use_input_stats")
      return stack[base + i].isBool() && stack[base + i].toBool();
  return false;
}

bool is_statistic(const c10::Argument& argument) {
  return argument.name() == "running_mean" || argument.name() == "running_var";
}

// Returns false, with the stack unchanged, for an operator that distributed tensors do not support. An
// operator that writes must not fall back to gathered parameters, because its writes would be lost.
bool runs_on_shards(const c10::OperatorHandle& op, const OperatorTraits& traits, Stack* stack,
                    std::size_t base) {
  if (traits.mutates) {
    op.callBoxed(stack);
    return true;
  }
  Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(base), stack->end());
  try {
    op.callBoxed(stack);
    return true;
  } catch (const NotImplemented&) {
    stack->resize(base);
    stack->insert(stack->end(), std::make_move_iterator(arguments.begin()),
                  std::make_move_iterator(arguments.end()));
    return false;
  }
}

void on_operator(const c10::OperatorHandle& op, Stack* stack) {
  const NoAnyHookGuard off;
  const OperatorTraits& traits = traits_of(op);
  const std::size_t base = stack->size() - traits.arguments.size();
  const Role role = role_of(op, traits);
  if (role == Role::Replaces)
    note_replacement((*stack)[base].toTensor(), (*stack)[base + 1].toTensor());
  else if (detail::replacements_pending())
    adopt_replacements(traits, *stack, base);
  if (role == Role::Sets)
    if (const at::Tensor self = (*stack)[base].toTensor();
        const ShardGroup* group = detail::find_parameter(self).group)
      if (group->materialized()) {
        // The memory of a parameter belongs to its group: as with set_data, the next use adopts the values.
        const at::Tensor source = (*stack)[base + 1].toTensor();
        note_replacement(self, source);
        self.set_data(source);
        stack->resize(base);
        stack->emplace_back(self);
        return;
      }
  if (role == Role::Handles || role == Role::Replaces) return op.callBoxed(stack);
  Uses uses, derived;
  for (std::size_t i = 0; i < traits.arguments.size(); ++i)
    if (traits.arguments[i].kind != ArgumentTraits::Kind::Other)
      for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
        if (!is_marked_for_any_hook(tensor)) return;
        const detail::Membership member = detail::find_member(tensor);
        if (!member.group) return;
        const Use use{member, tensor, traits.arguments[i].written};
        if (member.parameter == detail::kStale) refuse_stale(use, traits);
        (member.parameter == detail::kDerived ? derived : uses).push_back(use);
      });
  if (uses.empty() && derived.empty()) return op.callBoxed(stack);

  // A forward that is recomputed inside a backward is a forward.
  const bool backward = in_backward() && !StepContext::current()->recompute;
  const bool recording = at::GradMode::is_enabled();
  bool compute = !uses.empty() && (backward || recording || traits.pure_view);
  // If only some of several groups are gathered: whole tensors and shards cannot be mixed.
  const auto gathered = [](const Use& use) {
    return use.member.group->state() == ShardGroupState::Unsharded;
  };
  const bool some_gathered = std::any_of(uses.begin(), uses.end(), gathered);
  compute =
      compute || (some_gathered && !(derived.empty() && std::all_of(uses.begin(), uses.end(), gathered)));
  if (!compute)
    for (std::size_t i = 0; i < traits.arguments.size() && !compute; ++i)
      if (traits.arguments[i].kind != ArgumentTraits::Kind::Other)
        for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
          if (compute || is_marked_for_any_hook(tensor)) return;
          compute = uses.empty() ? cannot_combine(tensor, derived) : is_activation(tensor, uses);
        });
  if (!compute) {
    for (const Use& use : uses) {
      if (!use.written) continue;
      if (use.member.group->state() == ShardGroupState::Unsharded && !use.member.group->writable())
        refuse_write(use, traits);
      use.member.group->before_shards_change();
    }
    if (runs_on_shards(op, traits, stack, base)) {
      // Results of shards alone are remembered: an operator that takes one together with an activation needs
      // it whole.
      if (!traits.mutates && !some_gathered)
        for (std::size_t i = stack->size() - traits.returns.size(); i < stack->size(); ++i)
          for_each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
            detail::register_derived(tensor, *(uses.empty() ? derived : uses)[0].member.group);
          });
      return;
    }
  }

  for (const Use& use : uses) {
    if (!use.member.group->in_trial()) use.member.group->context().before_use(*use.member.group);
    if (use.written && !use.member.group->writable()) refuse_write(use, traits);
  }
  bool handles = !derived.empty();
  for (const Use& use : uses)
    handles = handles || (use.member.parameter < 0 && detail::dtensor_payload(use.tensor));
  c10::SmallVector<at::Tensor, 1> replaced;  // written: a temporary would take the writes
  const auto is_replaced = [&](const at::Tensor& tensor) {
    return std::any_of(replaced.begin(), replaced.end(),
                       [&](const at::Tensor& other) { return other.is_same(tensor); });
  };
  for (const Use& use : derived) {
    if (!use.written || is_replaced(use.tensor)) continue;
    gather_in_place(use, traits);
    replaced.push_back(use.tensor);
  }
  if (handles)
    map_arguments(op, stack, [&](const at::Tensor& tensor) {
      if (is_replaced(tensor)) return tensor;
      for (const Use& use : uses)
        if (use.tensor.is_same(tensor)) return gathered_handle(use);
      for (const Use& use : derived)
        if (use.tensor.is_same(tensor)) return gathered_result(use);
      return tensor;
    });

  const MixedPrecision& precision =
      (uses.empty() ? derived : uses)[0].member.group->options().mixed_precision;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> statistics;  // and their copies in the compute dtype
  if (!backward && precision.param_dtype && precision.cast_forward_inputs) {
    const bool trial =
        std::any_of(uses.begin(), uses.end(), [](const Use& use) { return use.member.group->in_trial(); });
    const bool updates = !trial && updates_statistics(op, *stack, base);
    for (std::size_t i = 0; i < traits.arguments.size(); ++i) {
      if (traits.arguments[i].kind == ArgumentTraits::Kind::Other || traits.arguments[i].written) continue;
      c10::IValue& value = (*stack)[base + i];
      value = map_tensors(value, [&](const at::Tensor& tensor) {
        const bool cast = tensor.dim() > 0 && at::isFloatingType(tensor.scalar_type()) &&
                          tensor.scalar_type() != *precision.param_dtype && !is_marked_for_any_hook(tensor);
        if (!cast) return tensor;
        at::Tensor copy = tensor.to(*precision.param_dtype);
        if (updates && is_statistic(op.schema().arguments()[i])) statistics.emplace_back(tensor, copy);
        return copy;
      });
    }
  }
  // The autograd graph holds the accumulators made here once the operator has run. Operators may also be
  // recorded in a backward, where a forward is recomputed. A custom function computes without recording if
  // the graph already holds its parameters.
  c10::SmallVector<AccumulatorPtr, 4> accumulators;
  for (const Use& use : uses)
    if (use.member.parameter >= 0 && use.tensor.requires_grad() && !use.member.group->in_trial() &&
        (recording || awaits_gradient(use.tensor))) {
      const auto slot = static_cast<std::size_t>(use.member.parameter);
      use.member.group->note_use();
      accumulators.push_back(send_gradient_to(use.tensor, *use.member.group, slot));
    }
  const std::optional<at::ScalarType> cast_to =
      role == Role::Casts ? requested_dtype(op, *stack, base) : std::nullopt;
  op.callBoxed(stack);
  if (!statistics.empty()) {
    const at::NoGradGuard no_grad;
    for (const auto& [original, copy] : statistics) original.copy_(copy);
  }
  if (role == Role::Casts && uses.size() == 1 && uses[0].member.parameter >= 0)
    uses[0].member.group->note_cast(static_cast<std::size_t>(uses[0].member.parameter),
                                    stack->back().toTensor(), cast_to);
}

}  // namespace

void install_trigger() { set_any_operator_hook(&on_operator); }

}  // namespace penstock
