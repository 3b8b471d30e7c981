// Compares a measured step with the simulation of its schedule under the measured costs.
//
//   TraceComparison comparison = compare_with_simulation(read_trace("step.json"));
//   fmt::print("{}", to_text(comparison));
//   comparison.efficiency();      // simulated / measured time: 1 if the runtime adds no overhead
//
// Costs are medians over the step, per stage and kind of action, so the simulation shows how long the
// schedule would take if every action took its usual time, transfers ran beside the computation, and nothing
// else happened. The excess of the measured step is overhead of the runtime, transfers that were not hidden,
// and actions that took longer than usual; the delays show where.
//
// Times are in milliseconds. Ranks are positions along the pipeline. Does not depend on Torch.
#pragma once

#include <string>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/pipeline/report/step_trace.h"

namespace penstock {

// Measured times of one kind of action of one stage. Members of an overlapped unit are excluded, because
// their individual times are unknown.
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
  double measured_ms = 0;  // from the beginning of the step on any rank to this rank's end
  double simulated_ms = 0;
  double busy_ms = 0;  // computing
  double wait_ms = 0;  // for data and for sends to complete
  double simulated_busy_ms = 0;
  double efficiency() const { return measured_ms > 0 ? simulated_ms / measured_ms : 1; }
};

// One compute action, or one overlapped unit.
struct ActionComparison {
  int rank = 0;
  std::string action;  // "2F0", "0F4|3B1"
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

  plan::CostModel model;          // times in milliseconds
  int transfers = 0;              // between ranks
  int measured_transfers = 0;     // with a known time: the receiver was already waiting
  std::vector<ActionCost> costs;  // by stage, then kind
  std::vector<RankComparison> ranks;
  std::vector<ActionComparison> actions;  // by rank, in the order of execution

  // Returns the actions that began furthest after their simulated begin, largest delay first.
  std::vector<ActionComparison> greatest_delays(std::size_t count) const;
};

// Returns the medians of the measured times. A kind that only occurs in overlapped units gets its share of
// their time. The latency is the median over the transfers for which a rank was already waiting; if there are
// none, the shortest time after which data was found to have arrived. It includes the time to transfer the
// data, so the bandwidth is infinite.
plan::CostModel measured_costs(const StepTrace& trace);

// Throws ConfigError for a trace whose events do not match its schedule, or whose schedule cannot run.
TraceComparison compare_with_simulation(const StepTrace& trace);

// Human-readable: costs, ranks, and the greatest delays.
std::string to_text(const TraceComparison& comparison);
// One line per action, after a header line: rank, action, begin, end, simulated begin, simulated end, delay.
std::string to_csv(const TraceComparison& comparison);

}  // namespace penstock
