// Compares what the front end of a model says (PipeInfo) with the schedule.
#pragma once

#include "penstock/pipeline.h"

namespace penstock {

// Throws ValueError, which says what to change, for a schedule with a different number of stages, for one
// without backward or a pipeline without a loss if the model was cut for training, and for a loss if it was
// cut without.
void check_pipe_info(const PipeInfo& info, const schedule::Schedule& schedule, bool has_loss);

}  // namespace penstock
