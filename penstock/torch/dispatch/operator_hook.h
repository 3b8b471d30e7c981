// Hooks for single operators on marked tensors, called before autograd.
//
//   register_operator_hook("aten::linear", [](const c10::OperatorHandle& op, Stack* stack) {
//     const NoHooksGuard off;                       // operators called from here do not call hooks
//     prepare((*stack)[stack->size() - 3]);  // the arguments are on top of the stack, as for a handler
//     op.callBoxed(stack);
//   });
//   mark_hooked(weight);                            // a wrapper: every linear with it calls the hook
//
// A payload sees operators below autograd, after composite ones (linear, layer_norm) have been decomposed. A
// hook sees the whole call, above autograd and autocast, so what it does is differentiated. C++ modules have
// no forward hooks; hooking the operator that takes a module's weight achieves the same without changing the
// module.
//
// No overhead for operators without a hook and for unmarked tensors. Views of a marked tensor are marked.
// Thread safety: register at startup; hooks may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

#include "penstock/operator_traits.h"

namespace penstock {

using OperatorHook = std::function<void(const c10::OperatorHandle& op, Stack* stack)>;

// Once per operator. Throws StateError for a second hook and ValueError for an operator that does not exist.
void register_operator_hook(const std::string& op, OperatorHook hook);

// Throws TypeError for a tensor that is not a wrapper.
void mark_hooked(const at::Tensor& wrapper);

class NoHooksGuard {
 public:
  NoHooksGuard();

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace penstock
