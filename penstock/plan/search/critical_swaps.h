// Makes a schedule faster by swapping adjacent actions on its critical path (simulated annealing).
//
// Only a swap of two actions that directly follow each other on one rank and on the critical path can shorten
// the step, and such a swap never causes a deadlock if both actions take time. To leave local optima,
// slightly slower orders are accepted with decreasing tolerance. Deterministic for a given seed.
#pragma once

#include <cstdint>

#include "penstock/plan/search/list_scheduler.h"
#include "penstock/simulator.h"

namespace penstock::plan {

// Returns the fastest order found within the limits, or the given one (without idle slots) if none is faster.
// `limits`: one per rank, one for all, or none.
schedule::Schedule improve_by_swaps(const schedule::Schedule& schedule, const CostModel& model,
                                    const std::vector<MemoryLimit>& limits, int trials, std::uint32_t seed);

}  // namespace penstock::plan
