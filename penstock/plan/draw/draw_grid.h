// Draws a schedule as a text table: a row per rank, a column per step.
//
// In every step each rank executes one slot, whatever its cost, if its inputs were computed in an earlier
// step; a dot is a step without work. Lowered schedules are laid out by dry_run.h, where both sides of a
// transfer may happen in the same step.
#pragma once

#include <string>

#include "penstock/schedule.h"

namespace penstock::plan {

struct GridOptions {
  bool colour = false;  // terminal escape sequences: the background shows the kind
};

// Throws ScheduleError for a schedule whose ranks wait for each other.
std::string draw_grid(const schedule::Schedule& schedule, const GridOptions& options = {});

}  // namespace penstock::plan
