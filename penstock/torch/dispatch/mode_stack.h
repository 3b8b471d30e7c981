// The modes of a thread. Private to this folder.
//
// They live in LibTorch's ThreadLocalDebugInfo, which at::ThreadLocalState carries to autograd's worker threads together
// with the dispatch key that brings operators here. The stack is a linked list of immutable nodes.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "penstock/mode.h"

namespace penstock::detail {

struct ModeNode final : c10::DebugInfoBase, std::enable_shared_from_this<ModeNode> {
  Mode* mode = nullptr;              // null: an empty stack above one that is not
  std::shared_ptr<ModeNode> below;
  // The thread's information with this node on top and without it. As long as nothing else was put on top, leaving the mode
  // is an exchange of pointers.
  const c10::ThreadLocalDebugInfo* with = nullptr;
  std::shared_ptr<c10::ThreadLocalDebugInfo> without;
};

// Null when no mode is on.
const ModeNode* current_mode_node();

// Leaves the innermost mode for a scope.
class PoppedMode {
 public:
  explicit PoppedMode(const ModeNode& top);
  ~PoppedMode();
  PoppedMode(const PoppedMode&) = delete;
  PoppedMode& operator=(const PoppedMode&) = delete;

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
};

}  // namespace penstock::detail
