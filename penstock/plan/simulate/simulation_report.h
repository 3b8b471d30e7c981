// Formats a simulation as text and as JSON.
#pragma once

#include <string>

#include "penstock/simulator.h"

namespace penstock::plan {

// A line of totals, one line per rank, and the last places where the critical path changes rank.
std::string to_text(const schedule::Schedule& schedule, const Simulation& simulation);

// Keys: time, bubble, span_bubble, per_rank[].{busy, idle, peak_activations, peak_bytes},
// critical_path[].{action, rank, start, end, waited_for}.
std::string to_json(const schedule::Schedule& schedule, const Simulation& simulation);

}  // namespace penstock::plan
