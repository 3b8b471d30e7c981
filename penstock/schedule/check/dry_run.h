// Runs a lowered schedule step by step without costs: in every step each rank executes its next slot if what
// it needs has happened, else it stalls.
//
// Within a step ranks act in ascending order and see what lower ranks did in the same step; a rank that
// stalled gets a second chance once the higher ranks have acted. A receive needs its send to have happened; a
// send never waits.
#pragma once

#include "penstock/schedule.h"

namespace penstock::schedule {

// The schedule with an idle slot for every stall; a rank that is done gets no further slots. UNSHARD, RESHARD
// and REDUCE_GRAD take a slot like any other action; use `without_sharding` to leave them out. Compute-only
// schedules run too: an action then waits for its input on the other rank. Throws ScheduleError when no rank
// can act.
Schedule dry_run(const Schedule& schedule);

}  // namespace penstock::schedule
