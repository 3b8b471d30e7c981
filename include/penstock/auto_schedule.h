// Searches for the fastest schedule for given costs and memory limits.
//
//   plan::AutoRequest request;
//   request.shape = {.ranks = 4, .microbatches = 12};
//   request.model.stages = {{.forward = 1, .backward_input = 1.2, .backward_weight = 0.7}};
//   request.limits = plan::one_f_one_b_limits(4, 12);  // no more memory than 1F1B
//   plan::AutoResult found = plan::auto_schedule(request);
//   std::cout << plan::draw_grid(found.schedule) << found.simulation.time << "\n";
//
// The search starts from the fastest fixed kind (generators.h) that fits the limits and looks for a faster
// order of the same work: first by a list scheduler with rules for each rank (how many microbatches are in
// flight, whether F or I comes first, when W may fill a gap), which are improved step by step; then by
// exchanging neighbors on the critical path. The fastest order by the simulator wins, so the result is never
// slower than the best fixed kind that fits. The backward is split into I and W where that helps. The search
// is deterministic: equal requests give equal schedules.
//
// Thread safety: pure functions; they may be called from any number of threads.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/generators.h"
#include "penstock/simulator.h"

namespace penstock::plan {

// What auto_schedule optimizes.
struct AutoRequest {
  schedule::PipelineShape shape;  // ranks, stages per rank, microbatches
  CostModel model;                // costs of all stages
  // Memory limits: one per rank, a single one for all, or empty for none.
  std::vector<MemoryLimit> limits;
  // Allowed placements. V needs two stages per rank and is skipped otherwise. Bidirectional needs a second
  // copy of the model and is always skipped.
  std::vector<schedule::StagePlacement> placements = {schedule::StagePlacement::Loop};
  // Maximum number of orders to try by rules for each placement, and of exchanges from each of up to two
  // starting points. At least 1; the 12 starting rules are always tried. Fewer are tried for large pipelines,
  // so that the search takes seconds.
  int trials = 400;
};

// What auto_schedule found.
struct AutoResult {
  schedule::Schedule schedule;  // compute-only; it and its lowered form are valid
  Simulation simulation;        // of this schedule under the request's model
  // The fastest fixed kind that fits the limits, or std::nullopt if none does.
  std::optional<schedule::ScheduleKind> best_fixed;
  double best_fixed_time = 0;  // its time, or 0
};

// Searches for the fastest schedule. Throws ValueError for an invalid request and if no schedule within the
// limits was found; the message then says what running one microbatch at a time needs.
AutoResult auto_schedule(const AutoRequest& request);

// Returns the number of activations that 1F1B holds on each rank, as limits.
std::vector<MemoryLimit> one_f_one_b_limits(int ranks, int microbatches);

// Returns whether no rank exceeds its limit. `limits` has one entry per rank, a single one for all, or is
// empty.
bool fits(const Simulation& simulation, const std::vector<MemoryLimit>& limits);

}  // namespace penstock::plan
