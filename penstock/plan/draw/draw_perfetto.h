// A simulated schedule as a trace: trace-event JSON, read by Perfetto (ui.perfetto.dev) and chrome://tracing.
//
// One process per rank with a thread for computation, one for transfers and one for collectives, arrows for
// what came from another rank, and counters of memory where the simulation has its curve. One unit of time is
// shown as one millisecond.
#pragma once

#include <string>

#include "penstock/draw.h"

namespace penstock::plan {

std::string draw_perfetto(const Drawing& drawing);

}  // namespace penstock::plan
