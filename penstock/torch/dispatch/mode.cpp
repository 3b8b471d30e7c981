#include "penstock/mode.h"

#include "penstock/torch/dispatch/dispatch_kernel.h"
#include "penstock/torch/dispatch/mode_stack.h"

namespace penstock {

namespace {

// A debug info kind that LibTorch itself uses on mobile only.
const auto kKind = c10::DebugInfoKind::MOBILE_RUNTIME_INFO;

void include_python(bool on) { c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Python, on); }
bool python_included() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python); }

detail::ModeNode* node() { return static_cast<detail::ModeNode*>(c10::ThreadLocalDebugInfo::get(kKind)); }

}  // namespace

namespace detail {

const ModeNode* current_mode_node() {
  const ModeNode* top = node();
  return top && top->mode ? top : nullptr;
}

PoppedMode::PoppedMode(const ModeNode& top) : before_(c10::ThreadLocalDebugInfo::current()) {
  if (before_.get() == top.with) [[likely]] {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(top.without);
  } else {
    // Other debug info was pushed on top and must stay visible: rebuild it on top of what is below the mode.
    static const auto& empty = *new std::shared_ptr<ModeNode>(std::make_shared<ModeNode>());
    c10::ThreadLocalDebugInfo::_push(kKind, top.below ? top.below : empty);
  }
  if (!top.below) include_python(false);
}

PoppedMode::~PoppedMode() {
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
  include_python(true);
}

Mode* mode_at(int depth_from_top) {
  const ModeNode* at = current_mode_node();
  for (; at && depth_from_top > 0; --depth_from_top) at = at->below.get();
  return at ? at->mode : nullptr;
}

}  // namespace detail

ModeGuard::ModeGuard(Mode& mode)
    : before_(c10::ThreadLocalDebugInfo::current()), included_before_(python_included()) {
  detail::install_dispatch_kernel();
  auto top = std::make_shared<detail::ModeNode>();
  top->mode = &mode;
  if (detail::current_mode_node()) top->below = node()->shared_from_this();
  top->without = before_;
  c10::ThreadLocalDebugInfo::_push(kKind, top);
  top->with = c10::ThreadLocalDebugInfo::current().get();
  include_python(true);
}

ModeGuard::~ModeGuard() {
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
  include_python(included_before_);
}

NoModesGuard::NoModesGuard()
    : before_(c10::ThreadLocalDebugInfo::current()), included_before_(python_included()) {
  if (!detail::current_mode_node()) return;
  c10::ThreadLocalDebugInfo::_push(kKind, std::make_shared<detail::ModeNode>());
  include_python(false);
}

NoModesGuard::~NoModesGuard() {
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
  include_python(included_before_);
}

Mode* current_mode() { return detail::mode_at(0); }

bool is_recording() {
  for (int i = 0;; ++i) {
    const Mode* mode = detail::mode_at(i);
    if (!mode || mode->records()) return mode != nullptr;
  }
}

int mode_depth() {
  int depth = 0;
  while (detail::mode_at(depth)) ++depth;
  return depth;
}

}  // namespace penstock
