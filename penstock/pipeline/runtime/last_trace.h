// The trace of the last step of a pipeline as a value. PipelineRuntime::write_trace writes it to a file.
#pragma once

#include <optional>

#include "penstock/pipeline.h"
#include "penstock/pipeline/report/step_trace.h"

namespace penstock {

// [collective over the pipeline] Returns what all ranks did in the last step, and when, on the first rank;
// std::nullopt on the others. Clocks are compared the first time; `align_again` repeats that, for runs long
// enough for clocks to drift. Throws StateError before the first step, after a failed one, and after a
// replayed one.
std::optional<StepTrace> trace_last_step(PipelineRuntime& pipeline, bool align_again = false);

}  // namespace penstock
