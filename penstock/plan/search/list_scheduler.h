// Builds a compute-only schedule by letting every rank, whenever it is free, pick the next F, I or W by a
// rule.
//
// The rules are few numbers per rank, so that `auto` can search over them. All decisions are made in the
// order of time under the cost model, with what is known at that moment: what has arrived and what is on its
// way. A microbatch never overtakes another one on the same stage and kind.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/schedule.h"

namespace penstock::plan {

// What a rank may hold at once. A limit of none is no limit.
struct MemoryLimit {
  std::optional<int> activations;
  std::optional<std::int64_t> bytes;
};

// How one rank chooses.
struct RankRule {
  // In-flight microbatches (of all its stages) above which it starts no further F although memory would allow
  // it.
  int in_flight = 1 << 30;
  // With both an F and an I at hand: take the F while fewer than this many microbatches are in flight, else
  // the I.
  int forward_first = 0;
  // With only a W at hand and an arrival known to come within `patience` x W: wait for the arrival instead.
  double patience = 0.5;
  // Weight gradients left open at most before one is done ahead of anything else.
  int open_weights = 1 << 30;
};

// Times of one pipeline, and the order each rank acts in. `time` is what the list scheduler itself expects;
// the simulator has the last word.
struct ListScheduled {
  schedule::Schedule schedule;
  double time;
};

// One rule and one limit per rank. Returns nothing when the rules lead into a dead end: a rank that may not
// start another F and has nothing else to do.
std::optional<ListScheduled> list_schedule(const schedule::StageMap& stages, const CostModel& model,
                                           const std::vector<MemoryLimit>& limits,
                                           const std::vector<RankRule>& rules);

}  // namespace penstock::plan
