// A measured step beside the simulation of its schedule under the costs that were measured.
//
//   TraceComparison comparison = compare_with_simulation(read_trace("step.json"));
//   fmt::print("{}", to_text(comparison));
//   comparison.efficiency();                    // simulated / measured time: 1 when the runtime adds nothing to what modules and links take
//
// Costs are medians over the step, per stage and kind of action, so the simulation says what the schedule would take if every action
// took its usual time, transfers ran beside the computation, and nothing else happened. What a measured step takes longer is
// overhead of the runtime, transfers that were not hidden, and actions that took longer than usual; the delays say where.
//
// Times are in milliseconds. Ranks are positions along the pipeline. Knows nothing of Torch.
#pragma once

#include <string>
#include <vector>

#include "penstock/pipeline/report/step_trace.h"
#include "penstock/cost_model.h"

namespace penstock::pipeline {

// Measured times of one kind of action of one stage. Members of an overlapped unit, whose own times nobody can tell, are not among
// them.
struct ActionCost {
  int stage = 0;
  schedule::ActionKind kind = schedule::ActionKind::Forward;
  int count = 0;
  double mean_ms = 0;
  double median_ms = 0;
  double least_ms = 0;
  double most_ms = 0;
  double simulated_ms = 0;
};

struct RankComparison {
  double measured_ms = 0;   // from the beginning of the step, on whatever rank, to this rank's end
  double simulated_ms = 0;
  double busy_ms = 0;       // computing
  double wait_ms = 0;       // for data and for what was sent
  double simulated_busy_ms = 0;
  double efficiency() const { return measured_ms > 0 ? simulated_ms / measured_ms : 1; }
};

// One compute action, or one overlapped unit.
struct ActionComparison {
  int rank = 0;
  std::string action;        // "2F0", "0F4|3B1"
  double begin_ms = 0;
  double end_ms = 0;
  double simulated_begin_ms = 0;
  double simulated_end_ms = 0;
  double delay_ms() const { return begin_ms - simulated_begin_ms; }
};

struct TraceComparison {
  double measured_ms = 0;
  double simulated_ms = 0;
  double efficiency() const { return measured_ms > 0 ? simulated_ms / measured_ms : 1; }

  plan::CostModel model;                   // with times in milliseconds
  int transfers = 0;                       // between ranks
  int measured_transfers = 0;              // those whose time is known: somebody was waiting when they were sent
  std::vector<ActionCost> costs;           // by stage, then kind
  std::vector<RankComparison> ranks;
  std::vector<ActionComparison> actions;   // by rank, in the order of execution

  // Those that began latest behind their simulated begin, the latest first.
  std::vector<ActionComparison> greatest_delays(std::size_t count) const;
};

// Medians of what was measured. A kind that only occurs in overlapped units gets its share of theirs. The latency is the median over
// the transfers for which a rank was waiting already; where there is none, the least time after which one was there. It contains
// the time that the data takes, so the bandwidth is endless.
plan::CostModel measured_costs(const StepTrace& trace);

// Throws ConfigError for a trace whose events are not those of its schedule, or whose schedule cannot run.
TraceComparison compare_with_simulation(const StepTrace& trace);

// For people: costs, ranks, and the greatest delays.
std::string to_text(const TraceComparison& comparison);
// One line per action: rank, action, begin, end, simulated begin, simulated end, delay, with a line of names.
std::string to_csv(const TraceComparison& comparison);

}  // namespace penstock::pipeline
