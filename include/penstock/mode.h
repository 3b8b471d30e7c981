// Modes: objects that intercept every operator called in a scope, on this thread and on autograd's worker
// threads that work for it.
//
//   class Counter final : public Mode {
//    public:
//     void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
//       ++calls[op.operator_name().name];
//       op.callBoxed(stack);                     // continues with the next mode, a wrapper or the kernel
//     }
//     std::map<std::string, int> calls;
//   };
//   Counter counter;
//   {
//     ModeGuard guard(counter);
//     model->forward(x).sum().backward();        // factories and backward are intercepted too
//   }
//
// A mode is called below autograd and autocast: it sees in-place and view operators as they are, and
// composite operators (`linear`, `reshape`) as the operators they consist of. While its handler runs, the
// mode is disabled. Modes nest: the mode entered last is called first, and operators that its handler calls
// go to the mode entered before it. Modes take precedence over wrappers (tensor_subclass.h). If a handler
// throws, all guards and other modes stay intact.
//
// A mode must outlive its guard and every thread that received the state of this thread
// (at::ThreadLocalState); autograd passes that state on only while backward() runs.
//
// Thread safety: several threads may enter a mode at the same time, and each of them calls it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "penstock/operator_traits.h"

namespace penstock {

// Base class of modes.
class Mode {
 public:
  // Modes may be deleted through this class.
  virtual ~Mode() = default;
  // Handles one operator. Its arguments are on top of the stack, as many as the schema has; the handler
  // replaces them with the results.
  virtual void dispatch(const c10::OperatorHandle& op, Stack* stack) = 0;
  // Whether the operators seen will be executed again with the same arguments. Code that passes values that
  // are valid only once, such as random keys, must fail then. Default: false.
  virtual bool records() const { return false; }
};

// Enters a mode for a scope. Created and destroyed on the same thread, innermost first.
class ModeGuard {
 public:
  // Enters the mode.
  explicit ModeGuard(Mode& mode);
  // Leaves the mode.
  ~ModeGuard();
  ModeGuard(const ModeGuard&) = delete;
  ModeGuard& operator=(const ModeGuard&) = delete;

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
  bool included_before_;
};

// Disables all modes for a scope, for code that needs real tensors. Wrappers still work.
class NoModesGuard {
 public:
  // Disables the modes.
  NoModesGuard();
  // Enables them again.
  ~NoModesGuard();
  NoModesGuard(const NoModesGuard&) = delete;
  NoModesGuard& operator=(const NoModesGuard&) = delete;

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
  bool included_before_;
};

// Returns the mode that the next operator of this thread is passed to, or null if no mode is active.
Mode* current_mode();
// Returns the innermost active mode of type M, or null if there is none.
template <class M>
M* find_mode();
// Returns whether an active mode records (Mode::records).
bool is_recording();
// Returns the number of active modes.
int mode_depth();

namespace detail {
Mode* mode_at(int depth_from_top);
}
template <class M>
M* find_mode() {
  for (int i = 0;; ++i) {
    Mode* mode = detail::mode_at(i);
    if (!mode) return nullptr;
    if (auto* found = dynamic_cast<M*>(mode)) return found;
  }
}

}  // namespace penstock
