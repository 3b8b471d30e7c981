// Calls of operators without boxing: a caller is compiled once for each common signature, such as
// Tensor(Tensor, Tensor, Scalar), and reads constants that were converted when the run was planned.
// Private to this folder. Thread safety: any thread.
#pragma once

#include "penstock/graph/compiler/run_plan.h"

namespace penstock::graph {

// Makes `step` an unboxed call if its operator has a known signature: sets `call` and `handle`, and replaces
// the constants, which are IValues, by converted ones that `plan` owns. Returns whether it has.
bool make_unboxed(Step& step, ExecutionPlan& plan);

}  // namespace penstock::graph
