// One hook above everything for every operator on marked tensors.
//
//   set_any_operator_hook([](const c10::OperatorHandle& op, Stack* stack) {
//     const NoAnyHookGuard off;                  // the operators called from here are ordinary ones
//     bring_what_is_missing(op, stack);          // arguments on top of the stack, as for a handler
//     op.callBoxed(stack);
//   });
//   mark_for_any_hook(parameter);                // plain tensor or wrapper: every operator on it calls the hook
//
// Where operator_hook.h serves single operators of wrappers, this one sees all operators, also on plain tensors, and comes first:
// before those hooks, before autocast and autograd. Views of a marked tensor, detached copies and what autograd saves of it are
// marked, so the hook also sees backward. Results are not marked. Unmarked tensors cost nothing.
//
// Thread rule: set the hook once, at the start; it may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "penstock/torch/dispatch/stack_tensors.h"

namespace penstock {

using AnyOperatorHook = void (*)(const c10::OperatorHandle& op, Stack* stack);

// Setting the same hook again does nothing; another one is a StateError.
void set_any_operator_hook(AnyOperatorHook hook);

void mark_for_any_hook(const at::Tensor& tensor);
bool is_marked_for_any_hook(const at::Tensor& tensor);

class NoAnyHookGuard {
 public:
  NoAnyHookGuard();

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace penstock
