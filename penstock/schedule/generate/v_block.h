// V-shaped schedules with bounded memory, made by repeating one building block.
//
// A block says when one microbatch's F, I and W run on each rank, in unit steps. A new microbatch starts
// every six steps, the work of one rank on one microbatch (two chunks of F, I and W), so the steady phase has
// no gaps if the block's six times differ modulo six on every rank. The time from a chunk's F to its W,
// divided by six, is how many of its activations are held: short blocks need little memory. On the two chunks
// of a rank in V placement a long and a short life always meet, so all ranks need the same.
#pragma once

#include <span>

#include "penstock/generators.h"

namespace penstock::schedule {

// Steps from one stage to the next on the four legs of a microbatch's way.
struct VBlockOffsets {
  int forward_down;   // F of chunk 0, rank 0 to P-1
  int forward_up;     // F of chunk 1, rank P-1 to 0
  int backward_down;  // I of chunk 1, rank 0 to P-1
  int backward_up;    // I of chunk 0, rank P-1 to 0
};

// Takes the candidate whose block holds least on its worst rank, then the shortest; waits at the turns keep
// its six times apart.
Schedule v_block_schedule(const PipelineShape& shape, std::span<const VBlockOffsets> candidates);

}  // namespace penstock::schedule
