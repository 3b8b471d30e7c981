// Whether two traces of a model compute the same.
//
// Thread safety: pure functions of their arguments.
#pragma once

#include <cstddef>

#include "penstock/pipeline/traced/pipe_state.h"

namespace penstock {

// Whether both, which may be of different modes, run the same operators with the same numbers on tensors of
// the same sizes. False for traces with functions of a user, which may look at more than their arguments.
bool same_operators(const PipeVariant& a, const PipeVariant& b);

// The same for one stage of two traces in one mode.
bool same_stage(const PipeVariant& a, const PipeVariant& b, std::size_t stage);

// Whether a stage other than the first gets the same from outside in both traces: tensors of the same sizes,
// and equal plain keyword arguments. It then cannot know which of the two it is to run.
bool same_arguments(const PipeVariant& a, const PipeVariant& b, std::size_t stage);

}  // namespace penstock
