// Draws a schedule as an HTML page: the picture with zoom and hover, memory over time, a table of the ranks.
// The page is self-contained, without external references.
#pragma once

#include <string>

#include "penstock/draw.h"

namespace penstock::plan {

// Includes memory over time if the simulation has the curve.
std::string draw_html(const Drawing& drawing);

}  // namespace penstock::plan
