// What LibTorch's thread-local state carries for Penstock: the context of the step, the half of an overlapped
// unit, and whether a graph for any rows of the microbatch is captured. Private to this folder.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <utility>

#include "penstock/step_context.h"
#include "penstock/torch/random/unit_half.h"

namespace penstock::detail {

// A function: LibTorch 2.14 has objects, initialized at run time, where earlier versions have constants.
inline auto step_info_kind() { return c10::DebugInfoKind::PRODUCER_INFO; }

struct StepInfo final : c10::DebugInfoBase {
  StepInfo(std::shared_ptr<const StepContext> the_context, std::shared_ptr<UnitHalf> the_half,
           bool for_any_rows)
      : context(std::move(the_context)), half(std::move(the_half)), any_rows(for_any_rows) {}
  const std::shared_ptr<const StepContext> context;
  const std::shared_ptr<UnitHalf> half;  // null: none
  const bool any_rows;                   // running_step.h: AnyRowsScope
};

// Returns null outside of any scope. Throws StateError if other code uses the kind.
const StepInfo* current_step_info();

}  // namespace penstock::detail
