// Collects the times of a step from all ranks of a pipeline, on one clock.
//
// Clocks. Each rank asks the first one for its time, several times; the answer was sent about halfway between
// request and arrival. The fastest round trip therefore determines the offset of the clocks, and half its
// duration bounds the error. Clocks that may be equal within this error are treated as equal.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/group.h"
#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/pipeline/report/step_trace.h"

namespace penstock {

// What to add to a time of this rank to get the time of the first rank.
struct ClockOffset {
  std::int64_t offset_ns = 0;
  std::int64_t error_ns = 0;
};
// Collective over the group.
ClockOffset align_clock(const comm::Group& control);

struct TraceRequest {
  const schedule::Schedule& lowered;  // as executed
  const std::vector<SkipConnection>& skips;
  ProgramOptions compile;
  std::uint64_t step = 0;
  const std::vector<TimedInstruction>& times;  // of this rank
  ClockOffset clock;
};
// Collective over the group: the first rank gets the trace, the others std::nullopt. `control` may be an
// empty group in a pipeline of one rank. Throws PipeliningMetadataError if the last steps of the ranks
// differ.
std::optional<StepTrace> collect_trace(const comm::Group& control, const TraceRequest& request);

}  // namespace penstock
