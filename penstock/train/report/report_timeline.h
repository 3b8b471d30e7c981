// One traced step as a picture: for every rank what it did, above what the simulation of its schedule does under the same costs.
#pragma once

#include <string>

#include "penstock/train/report/run_report.h"

namespace penstock::train {

// Inline SVG. Cells carry their words as data-tip and their microbatch as data-m, for the script of the page.
std::string draw_timeline(const TraceReport& report);

}  // namespace penstock::train
