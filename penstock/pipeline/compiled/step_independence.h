// Checks that a captured forward does not contain values of the step in which it was captured.
// Private to this folder.
#pragma once

#include "penstock/graph/trace/analyze.h"
#include "penstock/step_context.h"

namespace penstock {

// Captures the function in this step and in another one, which has another seed, step, microbatch and loss
// scale. Throws StateError, with the first operator that differs, if the graphs differ: replays would repeat
// the numbers of the first step. Unless the function `uses_rows`, the other step also has other rows of the
// microbatch. Costs two captures; nothing is computed.
void check_independence_of_step(const graph::Function& function, const graph::Values& inputs,
                                const graph::Convention& convention, const StepContext& step, bool uses_rows);

}  // namespace penstock
