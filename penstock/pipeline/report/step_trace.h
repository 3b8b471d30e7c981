// One executed step over all ranks: what each did when, on one clock. A value that is written as a trace-event file, which Perfetto
// (ui.perfetto.dev) and chrome://tracing show, and read back from it.
//
//   if (auto trace = pipeline.trace_last_step()) write_trace(*trace, "step.json");     // on rank 0 of the pipeline
//   StepTrace trace = read_trace("step.json");
//   TraceComparison comparison = compare_with_simulation(trace);                        // trace_comparison.h
//
// In the picture every rank is a process with a track for computation, one for waits and one for the starts of transfers; in an overlapped
// unit lie the pieces of its actions, as they took turns; an arrow leads from each send to the wait that it ended. Ranks are positions
// along the pipeline. Knows nothing of Torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/schedule.h"

namespace penstock::pipeline {

struct TraceEvent {
  enum class Kind : std::uint8_t {
    Compute,
    Post,    // a receive was started
    Await,
    Send,    // a send was started
    Pass,    // between stages of one rank
    Stage,   // UNSHARD, RESHARD, REDUCE_GRAD
    Finish,  // the wait for what was sent, at the end
  };
  Kind kind = Kind::Compute;
  std::vector<schedule::Action> actions;  // one; several of an overlapped unit; none of Finish
  std::optional<Channel> channel;         // of Post, Await, Send and Pass
  std::int64_t begin_ns = 0;              // since the step began on the first rank
  std::int64_t end_ns = 0;
  std::vector<UnitPiece> pieces = {};     // of an overlapped unit: how its actions took turns
  friend bool operator==(const TraceEvent&, const TraceEvent&) = default;
};
std::string_view to_text(TraceEvent::Kind kind);
// "0F4|3B1"; "finish".
std::string action_text(const TraceEvent& event);

struct StepTrace {
  std::uint64_t step = 0;
  schedule::Schedule schedule;                  // lowered, as it was executed: forwards alone in evaluation
  std::vector<std::vector<TraceEvent>> ranks;   // in the order of execution
  // How far the clock of each rank may be off that of rank 0.
  std::vector<std::int64_t> clock_error_ns;
  friend bool operator==(const StepTrace&, const StepTrace&) = default;

  // From the first begin to the last end of anything.
  std::int64_t duration_ns() const;
};

// The events of one rank, out of the times that the executor kept (one per instruction and one for the end), moved by `offset_ns`.
std::vector<TraceEvent> trace_events(const Program& program, const std::vector<TimedInstruction>& times, std::int64_t offset_ns);
// Lets the step begin at 0.
void start_at_zero(StepTrace& trace);

std::string to_chrome_json(const StepTrace& trace);
// Throws ConfigError that says what is wrong with the text: no JSON, not written by Penstock, or contradicting itself.
StepTrace parse_trace(std::string_view json);

// Throw ConfigError where the file cannot be written or read.
void write_trace(const StepTrace& trace, const std::string& path);
StepTrace read_trace(const std::string& path);

}  // namespace penstock::pipeline
