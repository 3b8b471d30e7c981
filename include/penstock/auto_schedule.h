// `auto`: the schedule that suits given costs and a memory limit.
//
// Starts from the fastest of all fixed kinds that fit the limit and searches for a faster order of the same
// work: first a list scheduler with a rule per rank (how many microbatches in flight, F or I first, when W
// may fill a gap), the rules improved step by step; then exchanges of neighbours on the critical path. The
// best order by the simulator wins, so the result is never slower than the best fixed one. The backward is
// split into I and W wherever that helps. Deterministic: the same request gives the same schedule.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/simulator.h"
#include "penstock/generators.h"

namespace penstock::plan {

struct AutoRequest {
  schedule::PipelineShape shape;
  CostModel model;
  // One per rank, a single one for all, or none.
  std::vector<MemoryLimit> limits;
  // Where stages may be placed. V needs two stages per rank and is left out otherwise. A bidirectional
  // placement would need a second copy of the model and is never chosen.
  std::vector<schedule::StagePlacement> placements = {schedule::StagePlacement::Loop};
  // How many orders are tried at most: by rules for each placement, and as many exchanges from each of two
  // starting points. Large pipelines get fewer, so that the search takes seconds.
  int trials = 400;
};

struct AutoResult {
  schedule::Schedule schedule;  // compute-only; it validates, lowers, and its lowered form validates
  Simulation simulation;
  // The fastest fixed kind that fits, where there is one.
  std::optional<schedule::ScheduleKind> best_fixed;
  double best_fixed_time = 0;
};

// Throws ValueError for a request that cannot be met; a limit that is too small is answered with what the
// least demanding order found needs.
AutoResult auto_schedule(const AutoRequest& request);

// What 1F1B holds on each rank.
std::vector<MemoryLimit> one_f_one_b_limits(int ranks, int microbatches);

// Whether no rank exceeds its limit (one per rank, one for all, or none).
bool fits(const Simulation& simulation, const std::vector<MemoryLimit>& limits);

}  // namespace penstock::plan
