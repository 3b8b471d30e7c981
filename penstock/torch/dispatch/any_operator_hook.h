// One hook that intercepts every operator on marked tensors, before all other dispatch keys.
//
//   set_any_operator_hook([](const c10::OperatorHandle& op, Stack* stack) {
//     const NoAnyHookGuard off;                  // operators called from here do not call the hook
//     bring_what_is_missing(op, stack);          // the arguments are on top of the stack, as for a handler
//     op.callBoxed(stack);
//   });
//   mark_for_any_hook(parameter);  // plain tensor or wrapper: every operator on it calls the hook
//
// operator_hook.h intercepts single operators on wrappers. This hook sees all operators, also on plain
// tensors, and runs first: before those hooks, autocast and autograd. Views of a marked tensor, detached
// copies and what autograd saves of it are marked, so the hook also sees backward. Results are not marked.
// Unmarked tensors have no overhead.
//
// Thread safety: set the hook once, at startup; it may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "penstock/operator_traits.h"

namespace penstock {

using AnyOperatorHook = void (*)(const c10::OperatorHandle& op, Stack* stack);

// Setting the same hook again does nothing; setting a different one throws StateError.
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
