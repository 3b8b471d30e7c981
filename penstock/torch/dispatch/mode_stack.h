// The stack of modes of a thread. Private to this folder.
//
// It is stored in LibTorch's ThreadLocalDebugInfo, which at::ThreadLocalState carries to autograd's worker
// threads together with the dispatch key that routes operators here. The stack is a linked list of immutable
// nodes.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "penstock/mode.h"

namespace penstock::detail {

struct ModeNode final : c10::DebugInfoBase, std::enable_shared_from_this<ModeNode> {
  Mode* mode = nullptr;  // null: an empty stack above a non-empty one
  std::shared_ptr<ModeNode> below;
  // The thread's debug info with and without this node on top. As long as nothing else was pushed on top,
  // leaving the mode is a pointer exchange.
  const c10::ThreadLocalDebugInfo* with = nullptr;
  std::shared_ptr<c10::ThreadLocalDebugInfo> without;
};

// Returns null if no mode is active.
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
