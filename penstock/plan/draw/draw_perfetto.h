// Writes a simulated schedule as trace-event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.
//
// One process per rank with a thread each for computation, transfers and collectives; arrows for data from
// another rank; and memory counters if the simulation has the curve. One unit of time is shown as one
// millisecond.
#pragma once

#include <string>

#include "penstock/draw.h"

namespace penstock::plan {

std::string draw_perfetto(const Drawing& drawing);

}  // namespace penstock::plan
