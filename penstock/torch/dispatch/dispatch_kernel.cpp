#include "penstock/torch/dispatch/dispatch_kernel.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include <mutex>

#include "penstock/errors.h"
#include "penstock/operator_traits.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/mode_stack.h"
#include "penstock/torch/dispatch/wrapper_impl.h"

namespace penstock::detail {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Keys above ours that must not run again for the operators a handler calls: autograd, autocast, functorch,
// functionalization. Conjugate, Negative and ZeroTensor stay enabled: they belong to single tensors, and an
// inner tensor with such a bit needs them.
constexpr DispatchKeySet kAbove =
    DispatchKeySet(DispatchKeySet::FULL) -
    (DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python) | DispatchKeySet(DispatchKey::Python) |
     DispatchKeySet(DispatchKey::Conjugate) | DispatchKeySet(DispatchKey::Negative) |
     DispatchKeySet(DispatchKey::ZeroTensor));

std::string type_of(const c10::IValue& value) { return value.tagKind(); }

// `who`: "mode" or "tensor subclass Two".
void check_results(const OperatorTraits& traits, const Stack& stack, std::size_t base, auto&& who) {
  const std::size_t left = stack.size() - std::min(base, stack.size());
  if (stack.size() < base || left != traits.returns.size()) [[unlikely]]
    throw TypeError(fmt::format(
        "{}: the handler of {} left {} values on the stack, expected {}; take the {} arguments off and push "
        "one value for each result",
        who(), traits.name, left, traits.returns.size(), traits.arguments.size()));
}

void check_tensors(const OperatorTraits& traits, const c10::FunctionSchema& schema, const Stack& stack,
                   std::size_t base, auto&& who) {
  for (std::size_t i = 0; i < traits.returns.size(); ++i) {
    const c10::IValue& value = stack[base + i];
    const c10::TypeKind kind = schema.returns()[i].type()->kind();
    if ((kind == c10::TypeKind::TensorType && !value.isTensor()) ||
        (kind == c10::TypeKind::ListType && !value.isList())) [[unlikely]]
      throw TypeError(fmt::format(
          "{}: result {} of {} is of type {}, expected {}; push what the operator's schema returns", who(), i,
          traits.name, type_of(value), schema.returns()[i].type()->str()));
  }
}

Payload* choose_payload(const OperatorTraits& traits, const Stack& stack, std::size_t base) {
  Payload* chosen = nullptr;
  const auto consider = [&](const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->key_set().has(DispatchKey::Python)) return;
    Payload* payload = payload_of(impl);
    if (!payload)
      throw TypeError(fmt::format(
          "{}: an argument is a tensor subclass that was not created by Penstock (a plain tensor that got a "
          "wrapper's data by set_data, or a Python subclass); use replace_data instead of set_data",
          traits.name));
    if (!chosen || payload->priority() > chosen->priority()) chosen = payload;
  };
  for (std::size_t i = 0; i < traits.arguments.size(); ++i)
    if (traits.arguments[i].kind != ArgumentTraits::Kind::Other) for_each_tensor(stack[base + i], consider);
  return chosen;
}

void call_payload(const c10::OperatorHandle& op, const OperatorTraits& traits, Stack* stack, std::size_t base,
                  Payload* chosen) {
  // The handler may drop the last tensor that holds its payload.
  const PayloadPtr keep = PayloadPtr::reclaim_copy(chosen);
  // If the operator has as many arguments as results, a handler that does nothing would return its argument
  // as the result.
  const bool may_be_forgotten = traits.arguments.size() == 1 && traits.returns.size() == 1 &&
                                traits.returns[0].kind == ReturnAlias::Kind::Fresh &&
                                (*stack)[base].isTensor();
  // Hold the tensor, not only its address: a result may be allocated at the address of an argument that
  // nobody else holds.
  const at::Tensor argument = may_be_forgotten ? (*stack)[base].toTensor() : at::Tensor();
  chosen->dispatch(op, stack);
  const auto who = [&] { return fmt::format("tensor subclass {}", keep->kind()); };
  check_results(traits, *stack, base, who);
  check_tensors(traits, op.schema(), *stack, base, who);
  if (may_be_forgotten && (*stack)[base].isTensor() && (*stack)[base].toTensor().is_same(argument) &&
      op.operator_name().name != "aten::lift") [[unlikely]]
    throw TypeError(fmt::format(
        "tensor subclass {}: the handler of {} returned its argument unchanged; handle the operator, or call "
        "Payload::refuse for one that is not supported",
        keep->kind(), traits.name));
}

void dispatch_kernel(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAbove);
  const OperatorTraits& traits = traits_of(op);
  if (traits.composite) [[unlikely]] {
    // Composite operators reach this point only without autograd (InferenceMode); the operators they call
    // come back here.
    op.callBoxedForDispatchKey(DispatchKey::CompositeImplicitAutograd, *stack);
    return;
  }
  const std::size_t base = stack->size() - traits.arguments.size();
  if (const ModeNode* top = current_mode_node()) {
    const PoppedMode popped(*top);
    top->mode->dispatch(op, stack);
    check_results(traits, *stack, base, [] { return "mode"; });
    return;
  }
  if (Payload* chosen = choose_payload(traits, *stack, base)) {
    call_payload(op, traits, stack, base, chosen);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard off(DispatchKeySet(DispatchKey::Python));
  op.callBoxed(stack);
}

// LibTorch allows one fallback per key, and its function to remove one is private. Explicit instantiation may
// name private members.
template <class Tag, typename Tag::Type member>
struct PrivateMember {
  friend typename Tag::Type reveal(Tag) { return member; }
};
struct DeregisterFallback {
  using Type = void (c10::Dispatcher::*)(DispatchKey);
  friend Type reveal(DeregisterFallback);
};
template struct PrivateMember<DeregisterFallback, &c10::Dispatcher::deregisterFallback_>;

}  // namespace

void install_dispatch_kernel() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    (dispatcher.*reveal(DeregisterFallback{}))(DispatchKey::Python);
    // Never freed: wrappers may outlive every static object.
    new c10::RegistrationHandleRAII(dispatcher.registerFallback(
        DispatchKey::Python, c10::KernelFunction::makeFromBoxedFunction<&dispatch_kernel>(),
        "penstock: wrappers and modes"));
  });
}

}  // namespace penstock::detail
