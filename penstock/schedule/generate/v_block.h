// V-shaped schedules with bounded memory, built by repeating one block.
//
// A block defines when the F, I and W of one microbatch run on each rank, in unit steps. A new microbatch
// starts every six steps, the work of one rank on one microbatch (two chunks of F, I and W), so the steady
// phase has no gaps if the block's six times differ modulo six on every rank. The time from a chunk's F to
// its W, divided by six, is the number of its activations held: short blocks need little memory. In V
// placement each rank has one chunk with a long and one with a short lifetime, so all ranks need the same
// memory.
#pragma once

#include <span>

#include "penstock/generators.h"

namespace penstock::schedule {

// Steps from one stage to the next on the four legs of a microbatch's path.
struct VBlockOffsets {
  int forward_down;   // F of chunk 0, rank 0 to P-1
  int forward_up;     // F of chunk 1, rank P-1 to 0
  int backward_down;  // I of chunk 1, rank 0 to P-1
  int backward_up;    // I of chunk 0, rank P-1 to 0
};

// Uses the candidate whose block holds least on its worst rank, then the shortest; waits at the turns keep
// its six times distinct.
Schedule v_block_schedule(const PipelineShape& shape, std::span<const VBlockOffsets> candidates);

}  // namespace penstock::schedule
