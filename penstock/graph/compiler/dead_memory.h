// Results in the memory of arguments that are not used afterwards: pointwise operators whose `out=` or
// in-place form computes the same bits.
// Private to this folder. Thread safety: any thread.
#pragma once

#include <c10/util/Optional.h>

#include <optional>

#include "penstock/graph/compiler/run_plan.h"

namespace penstock::graph {

// The form of an operator that writes its result to an argument.
struct WritingForm {
  c10::OperatorHandle op;
  bool in_place = false;  // writes its first argument; otherwise the result is one more argument
};

// Returns std::nullopt for an operator that is not in the table, or if this LibTorch has no such form of it.
std::optional<WritingForm> writing_form(const c10::OperatorHandle& op);

}  // namespace penstock::graph
