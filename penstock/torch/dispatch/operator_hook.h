// Hooks before autograd for single operators on marked tensors.
//
//   register_operator_hook("aten::linear", [](const c10::OperatorHandle& op, Stack* stack) {
//     const NoHooksGuard off;                       // the operators called from here are ordinary ones
//     prepare((*stack)[stack->size() - 3]);         // arguments on top of the stack, as for a handler
//     op.callBoxed(stack);
//   });
//   mark_hooked(weight);                            // a wrapper: every linear with it calls the hook
//
// A payload sees operators below autograd, where composite ones (linear, layer_norm) have fallen apart. A hook sees the whole
// call, above autograd and autocast: what it does is differentiated. C++ modules have no forward hooks; the operator that
// takes a module's weight is the place where one can be had without changing the module.
//
// Costs nothing for operators without a hook and for tensors that are not marked. Views of a marked tensor are marked.
// Thread rule: register at the start of the program; hooks may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

#include "penstock/torch/dispatch/stack_tensors.h"

namespace penstock {

using OperatorHook = std::function<void(const c10::OperatorHandle& op, Stack* stack)>;

// Once per operator: a second hook is a StateError, an operator that does not exist a ValueError.
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
