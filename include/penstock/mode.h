// Modes: an object that sees every operator called in a scope, on this thread and on autograd's worker threads that work
// for it.
//
//   class Counter final : public penstock::Mode {
//    public:
//     void dispatch(const c10::OperatorHandle& op, penstock::Stack* stack) override {
//       ++calls[op.operator_name().name];
//       op.callBoxed(stack);                        // go on: to the mode below, to a wrapper, to the kernel
//     }
//     std::map<std::string, int> calls;
//   } counter;
//   {
//     penstock::ModeGuard guard(counter);
//     model->forward(input).sum().backward();       // factories and backward are seen too
//   }
//
// A mode sees operators below autograd and autocast: in-place and view operators as they are, composite ones (`linear`,
// `reshape`) as their parts. Its handler runs with the mode itself switched off. Modes nest: the one entered last sees an
// operator first, and what its handler calls goes to the one before. Modes come before wrappers.
// A handler that throws leaves every guard and every other mode as they were.
// Lifetime: the mode must outlive its guard and every thread that was handed the state of this one (at::ThreadLocalState);
// autograd hands it over only while backward() runs.
// Thread rule: a mode may be entered by several threads at once and is then called by each of them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "penstock/stack_tensors.h"

namespace penstock {

class Mode {
 public:
  virtual ~Mode() = default;
  // As Payload::dispatch: arguments on top of the stack, replaced by the results.
  virtual void dispatch(const c10::OperatorHandle& op, Stack* stack) = 0;
  // True when what is seen will be run again as it was: code that gives operators numbers of one time only must refuse.
  virtual bool records() const { return false; }
};

// Enters a mode for a scope.
class ModeGuard {
 public:
  explicit ModeGuard(Mode& mode);
  ~ModeGuard();
  ModeGuard(const ModeGuard&) = delete;
  ModeGuard& operator=(const ModeGuard&) = delete;

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
  bool included_before_;
};

// Leaves every mode for a scope; wrappers still work. For code inside a scope that must see real tensors.
class NoModesGuard {
 public:
  NoModesGuard();
  ~NoModesGuard();
  NoModesGuard(const NoModesGuard&) = delete;
  NoModesGuard& operator=(const NoModesGuard&) = delete;

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
  bool included_before_;
};

// The mode that would see the next operator of this thread; null outside of every mode.
Mode* current_mode();
// The innermost mode of type M that is on, whatever lies above it; null when there is none.
template <class M>
M* find_mode();
// Whether some mode that is on records: see Mode::records.
bool is_recording();
// How many modes are on.
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
