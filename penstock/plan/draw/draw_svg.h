// Draws a schedule over time as SVG: a row per rank, a coloured cell per action, axis, legend and totals.
#pragma once

#include <string>

#include "penstock/draw.h"

namespace penstock::plan {

struct SvgOptions {
  // Hover text as <title> children, which every viewer shows; if false, as data-tip, with the microbatch as
  // data-m, for the script of the surrounding page.
  bool titles = true;
  // Name, shape and totals above the rows.
  bool heading = true;
};

std::string draw_svg(const Drawing& drawing, const SvgOptions& options = {});

}  // namespace penstock::plan
