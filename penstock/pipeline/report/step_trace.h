// The trace of one executed step: what each rank did and when, on one clock. It can be written as a
// trace-event file, which Perfetto (ui.perfetto.dev) and chrome://tracing display, and read back.
//
//   // on rank 0 of the pipeline
//   if (auto trace = trace_last_step(pipeline)) write_trace(*trace, "step.json");
//   StepTrace trace = read_trace("step.json");
//   TraceComparison comparison = compare_with_simulation(trace);                        // trace_comparison.h
//
// In the viewer every rank is a process with one track for computation, one for waits and one for the starts
// of transfers. An overlapped unit contains the pieces of its actions as they took turns. If they exchanged
// rows of experts, two more tracks show its forwards and its backwards: pieces of computation, and exchanges
// during which the other one computed. An arrow leads from each send to the wait that it ended. Ranks are
// positions along the pipeline. Does not depend on Torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/schedule.h"

namespace penstock {

struct TraceEvent {
  enum class Kind : std::uint8_t {
    Compute,
    Post,  // a receive was started
    Await,
    Send,    // a send was started
    Pass,    // between stages of one rank
    Stage,   // UNSHARD, RESHARD, REDUCE_GRAD
    Finish,  // waiting for sends to complete, at the end
  };
  Kind kind = Kind::Compute;
  std::vector<schedule::Action> actions;  // one; several for an overlapped unit; none for Finish
  std::optional<Channel> channel;         // for Post, Await, Send and Pass
  std::int64_t begin_ns = 0;              // since the step began on the first rank
  std::int64_t end_ns = 0;
  std::vector<UnitPiece> pieces = {};  // for an overlapped unit: how its actions took turns
  friend bool operator==(const TraceEvent&, const TraceEvent&) = default;
};
std::string_view to_text(TraceEvent::Kind kind);
// "0F4|3B1"; "finish".
std::string action_text(const TraceEvent& event);

struct StepTrace {
  std::uint64_t step = 0;
  schedule::Schedule schedule;                 // lowered, as executed: only forwards in evaluation
  std::vector<std::vector<TraceEvent>> ranks;  // in the order of execution
  // Upper bound of the clock error of each rank relative to rank 0.
  std::vector<std::int64_t> clock_error_ns;
  friend bool operator==(const StepTrace&, const StepTrace&) = default;

  // From the first begin to the last end of any event.
  std::int64_t duration_ns() const;
};

// Returns the events of one rank, from the times that the executor kept (one per instruction and one for the
// end), shifted by `offset_ns`.
std::vector<TraceEvent> trace_events(const Program& program, const std::vector<TimedInstruction>& times,
                                     std::int64_t offset_ns);
// Shifts all times so that the step begins at 0.
void start_at_zero(StepTrace& trace);

std::string to_chrome_json(const StepTrace& trace);
// Throws ConfigError with the reason if the text is not JSON, was not written by Penstock, or is
// inconsistent.
StepTrace parse_trace(std::string_view json);

// Throw ConfigError if the file cannot be written or read.
void write_trace(const StepTrace& trace, const std::string& path);
StepTrace read_trace(const std::string& path);

}  // namespace penstock
