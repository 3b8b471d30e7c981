// A schedule as a table of text: a row per rank, a column per step.
//
// In every step each rank executes one slot, whatever it costs, if what it needs happened in an earlier step;
// a dot is a step without work. Lowered schedules are laid out as by dry_run.h, where a transfer may take
// both its slots in one step.
#pragma once

#include <string>

#include "penstock/schedule.h"

namespace penstock::plan {

struct GridOptions {
  bool colour = false;  // escape sequences of a terminal: the background tells the kind
};

// Throws ScheduleError for a schedule whose ranks wait for each other.
std::string draw_grid(const schedule::Schedule& schedule, const GridOptions& options = {});

}  // namespace penstock::plan
