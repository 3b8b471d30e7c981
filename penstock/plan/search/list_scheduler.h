// Builds a compute-only schedule by list scheduling: whenever a rank is free, it picks the next F, I or W by
// a rule.
//
// A rule is a few numbers per rank, so that `auto` can search over them. Decisions are made in the order of
// time under the cost model, with the information available at that moment: what has arrived and what is in
// transit. On one stage, actions of the same kind run in microbatch order.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/schedule.h"

namespace penstock::plan {

// How one rank chooses.
struct RankRule {
  // Microbatches in flight (of all its stages) at which it starts no further F, even if memory would allow
  // it.
  int in_flight = 1 << 30;
  // With both an F and an I ready: takes the F while fewer than this many microbatches are in flight,
  // otherwise the I.
  int forward_first = 0;
  // With only a W ready and an arrival known within `patience` x W: waits for the arrival instead.
  double patience = 0.5;
  // Maximum number of deferred weight gradients; beyond it one runs before anything else.
  int open_weights = 1 << 30;
};

// The order in which each rank acts. `time` is the list scheduler's own estimate; the simulator is
// authoritative.
struct ListScheduled {
  schedule::Schedule schedule;
  double time;
};

// One rule and one limit per rank. Returns std::nullopt if the rules lead to a dead end: a rank that may not
// start another F and has nothing else to do.
std::optional<ListScheduled> list_schedule(const schedule::StageMap& stages, const CostModel& model,
                                           const std::vector<MemoryLimit>& limits,
                                           const std::vector<RankRule>& rules);

}  // namespace penstock::plan
