#include "penstock/torch/dispatch/operator_hook.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include <mutex>
#include <set>
#include <typeinfo>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/wrapper_impl.h"

namespace penstock {
namespace {

// A dispatch key above autograd and autocast that LibTorch reserves for experiments and does not use.
constexpr c10::DispatchKey kHookKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

class HookKernel final : public c10::OperatorKernel {
 public:
  explicit HookKernel(OperatorHook hook) : hook_(std::move(hook)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { hook_(op, stack); }

 private:
  OperatorHook hook_;
};

// Operators without a hook must skip the key.
void install_fallthrough() {
  static std::once_flag once;
  std::call_once(once, [] {
    new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
        kHookKey, c10::KernelFunction::makeFallthrough(), "penstock: operator hooks"));
  });
}

}  // namespace

void register_operator_hook(const std::string& op, OperatorHook hook) {
  install_fallthrough();
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::size_t dot = op.find('.', op.find("::"));
  const c10::OperatorName name(op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1));
  if (!dispatcher.findSchema(name))
    throw ValueError(describe("register_operator_hook: operator", op, "one that exists, like aten::linear"));
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (!known.insert(op).second)
    throw StateError(fmt::format("register_operator_hook: {} already has a hook", op));
  // Never freed: marked tensors may live until the process ends.
  new c10::RegistrationHandleRAII(dispatcher.registerImpl(
      name, kHookKey,
      c10::KernelFunction::makeFromBoxedFunctor<HookKernel>(std::make_unique<HookKernel>(std::move(hook))),
      c10::nullopt, nullptr, "penstock: operator hook"));
}

void mark_hooked(const at::Tensor& wrapper) {
  install_fallthrough();
  c10::TensorImpl* impl = wrapper.defined() ? wrapper.unsafeGetTensorImpl() : nullptr;
  if (impl && typeid(*impl) == typeid(detail::WrapperImpl))
    static_cast<detail::WrapperImpl*>(impl)->add_key(kHookKey);
  else if (impl && typeid(*impl) == typeid(detail::AdoptedImpl))
    static_cast<detail::AdoptedImpl*>(impl)->add_key(kHookKey);
  else
    throw TypeError(describe("mark_hooked", "a plain tensor", "a wrapper",
                             "make it one first (make_wrapper, replace_data)"));
}

NoHooksGuard::NoHooksGuard() : exclude_(c10::DispatchKeySet(kHookKey)) {}

}  // namespace penstock
