// A schedule as a page of its own: the picture with zoom and hover, memory over time, a table of the ranks.
// One file without references to anything outside.
#pragma once

#include <string>

#include "penstock/draw.h"

namespace penstock::plan {

// Draws memory over time where the simulation has its curve.
std::string draw_html(const Drawing& drawing);

}  // namespace penstock::plan
