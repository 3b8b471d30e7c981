// The parts that `check` is made of.
#pragma once

#include "penstock/validate.h"

namespace penstock::schedule {

// Runs the rows side by side under the communication model of validate.h. Needs a schedule without other
// violations. Adds a Deadlock (with its cycle) or TransferOrder violation to the report if they cannot run to
// their end.
void check_progress(const Schedule& schedule, SendModel sends, Report& report);

// The rows around the given places. `waiting` is marked >so<, `wanted` [so].
std::string marked_grid(const Schedule& schedule, const std::vector<Place>& waiting,
                        const std::vector<Place>& wanted);

// "rank 1, slot 3 (1F1)".
std::string place_text(const Schedule& schedule, const Place& place);

}  // namespace penstock::schedule
