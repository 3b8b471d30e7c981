// Executes a schedule step by step without costs: in every step each rank executes its next slot if its
// inputs are available, otherwise it stalls.
//
// Within a step ranks act in ascending order and see the results of lower ranks of the same step; a rank that
// stalled is tried again after the higher ranks have acted. A receive requires that its send has happened; a
// send never waits.
#pragma once

#include "penstock/schedule.h"

namespace penstock::schedule {

// Returns the schedule with an idle slot for every stall; a rank that has finished gets no further slots.
// UNSHARD, RESHARD and REDUCE_GRAD take a slot like any other action; use `without_sharding` to omit them.
// Compute-only schedules are allowed: an action then waits until the other rank has produced its input.
// Throws ScheduleError if no rank can act.
Schedule dry_run(const Schedule& schedule);

}  // namespace penstock::schedule
