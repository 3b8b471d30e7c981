// The eight phases of a DualPipe row, shared by the V-shaped and the bidirectional schedule.
#pragma once

#include "penstock/schedule.h"

namespace penstock::schedule {

// The two stages of one rank. "Near" is the one whose microbatches enter the pipeline close to this rank,
// "far" the other.
struct DualPipeSide {
  int stage;
  int first_microbatch;
};

// `depth`: ranks on one arm of the pipeline. `position`: this rank's position on it (0 is where microbatches
// of the near side enter). `microbatches`: how many each side runs. Requires microbatches >= 2 * depth.
Row dual_pipe_row(int depth, int position, int microbatches, DualPipeSide near, DualPipeSide far);

}  // namespace penstock::schedule
