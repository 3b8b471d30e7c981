// Makes an order of actions faster by exchanging neighbours on its critical path.
//
// Only an exchange of two actions that follow each other directly on one rank and on the critical path can
// shorten the step, and such an exchange never makes ranks wait for each other as long as both take time. Now
// and then a slightly slower order is accepted, ever less so, to leave dead ends. Deterministic for a given
// seed.
#pragma once

#include <cstdint>

#include "penstock/plan/search/list_scheduler.h"
#include "penstock/simulator.h"

namespace penstock::plan {

// Returns the fastest order found that keeps the limits, the given one (without idle slots) if none is
// faster. `limits`: one per rank, one for all, or none.
schedule::Schedule improve_by_swaps(const schedule::Schedule& schedule, const CostModel& model,
                                    const std::vector<MemoryLimit>& limits, int trials, std::uint32_t seed);

}  // namespace penstock::plan
