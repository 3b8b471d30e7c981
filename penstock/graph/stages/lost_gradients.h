// Finds where a stage loses the gradient of something that required none when the stage was traced.
//
//   if (const auto node = first_without_derivative(trace, stage, {embedding}))
//     throw ValueError(trace.line(*node));
//
// A user-defined autograd function is recorded with a derivative for the arguments that required a gradient,
// and with none at all if no argument did. Everything else is differentiated as it runs.
//
// Pure function. Thread safety: any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "penstock/graph/stages/forward_trace.h"
#include "penstock/graph/stages/pipe_cut.h"

namespace penstock::graph {

// The first operator of the stage that ran without grad mode and takes something that requires a gradient
// only because these inputs do, none of which did in the trace. What is computed in memory that such a value
// was written to counts as well. Empty if no gradient is lost.
std::optional<std::size_t> first_without_derivative(const ForwardTrace& trace, const CutStage& stage,
                                                    const std::vector<ValueId>& inputs);

}  // namespace penstock::graph
