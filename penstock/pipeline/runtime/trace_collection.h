// Brings the times of a step from all ranks of a pipeline together on one clock.
//
// Clocks. Each rank asks the first one for its time, several times over; the answer was given about halfway between question and
// arrival, so the question that took least says best how far the clocks are apart, and half of what it took how far that may be wrong. Clocks
// that may be the same by this count as the same.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/group.h"
#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/pipeline/report/step_trace.h"

namespace penstock::pipeline {

// What to add to times of this rank to get those of the first one.
struct ClockOffset {
  std::int64_t offset_ns = 0;
  std::int64_t error_ns = 0;
};
// Collective over the group.
ClockOffset align_clock(const comm::Group& control);

struct TraceRequest {
  const schedule::Schedule& lowered;            // as executed
  const std::vector<SkipConnection>& skips;
  ProgramOptions compile;
  std::uint64_t step = 0;
  const std::vector<TimedInstruction>& times;   // of this rank
  ClockOffset clock;
};
// Collective over the group: the first rank gets the trace, the others nothing. `control` may be null-like in a pipeline of one rank.
// Throws PipeliningMetadataError for ranks whose last steps were not the same one.
std::optional<StepTrace> collect_trace(const comm::Group& control, const TraceRequest& request);

}  // namespace penstock::pipeline
