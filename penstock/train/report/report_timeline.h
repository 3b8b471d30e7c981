// Draws one traced step: for each rank the measured actions above the simulated ones under the same costs.
#pragma once

#include <string>

#include "penstock/train/report/run_report.h"

namespace penstock::train {

// Returns inline SVG. Cells carry their text as data-tip and their microbatch as data-m, for the page's
// script.
std::string draw_timeline(const TraceReport& report);

}  // namespace penstock::train
