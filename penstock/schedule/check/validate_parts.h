// The parts of `check`.
#pragma once

#include "penstock/validate.h"

namespace penstock::schedule {

// Executes all rows in parallel under the communication model of validate.h. Requires a schedule without
// other violations. Adds a Deadlock (with its cycle) or TransferOrder violation to the report if they cannot
// run to completion.
void check_progress(const Schedule& schedule, SendModel sends, Report& report);

// Renders the rows around the given places. `waiting` is marked >2F0<, `wanted` [2F0].
std::string marked_grid(const Schedule& schedule, const std::vector<Place>& waiting,
                        const std::vector<Place>& wanted);

// "rank 1, slot 3 (1F1)".
std::string place_text(const Schedule& schedule, const Place& place);

}  // namespace penstock::schedule
