// Calls of operators without boxing: a caller is compiled once for each common signature, such as
// Tensor(Tensor, Tensor, Scalar), and reads constants that were converted when the run was planned.
// Private to this folder. Thread safety: any thread.
#pragma once

#include "penstock/graph/compiler/run_plan.h"

namespace penstock::graph {

struct UnboxedSignature;

// How the calls of an operator are made without boxing.
struct UnboxedForm {
  const UnboxedSignature* signature = nullptr;  // null: they are not
  const void* handle = nullptr;                 // Step::handle
};

// Of any operator. The handle is in `memory`.
UnboxedForm unboxed_form(const c10::OperatorHandle& op, PlanMemory& memory);

// Makes `step`, a call of the operator of `form`, an unboxed one: sets `call` and `handle`, and replaces the
// constants, which are IValues, by converted ones in `memory`. Returns false, and changes nothing, if that is
// not possible.
bool make_unboxed(Step& step, const UnboxedForm& form, PlanMemory& memory);

}  // namespace penstock::graph
