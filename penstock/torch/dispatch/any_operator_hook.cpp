#include "penstock/torch/dispatch/any_operator_hook.h"

#include <c10/core/TensorImpl.h>

#include <atomic>
#include <mutex>

#include "penstock/errors.h"

namespace penstock {
namespace {

// The other dispatch key that LibTorch reserves for experiments; it has a higher priority than the one of
// operator_hook.cpp.
constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

std::atomic<AnyOperatorHook> the_hook = nullptr;

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  the_hook.load(std::memory_order_relaxed)(op, stack);
}

// Any TensorImpl may be marked, but its key set is protected; a derived class can access it.
struct Keys : c10::TensorImpl {
  static constexpr c10::DispatchKeySet c10::TensorImpl::*kPlace = &Keys::key_set_;
};

}  // namespace

void set_any_operator_hook(AnyOperatorHook hook) {
  static std::mutex& mutex = *new std::mutex;
  const std::lock_guard lock(mutex);
  if (the_hook == hook) return;
  if (the_hook != nullptr)
    throw StateError("set_any_operator_hook: a hook is already set; a process can have only one");
  the_hook = hook;
  // Never freed: marked tensors may live until the process ends.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
      kKey, c10::KernelFunction::makeFromBoxedFunction<&kernel>(), "penstock: hook for every operator"));
}

void mark_for_any_hook(const at::Tensor& tensor) {
  if (!tensor.defined()) throw TypeError("mark_for_any_hook: the tensor is undefined");
  if (the_hook.load() == nullptr)
    throw StateError("mark_for_any_hook: no hook is set; call set_any_operator_hook first");
  c10::DispatchKeySet& keys = tensor.unsafeGetTensorImpl()->*Keys::kPlace;
  keys = keys.add(kKey);
}

bool is_marked_for_any_hook(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(kKey);
}

NoAnyHookGuard::NoAnyHookGuard() : exclude_(c10::DispatchKeySet(kKey)) {}

}  // namespace penstock
