// V-Min: about a third of 1F1B's activation memory, the minimum for repeated V-shaped blocks. Every leg takes
// one step per stage: a path of 4P steps, of which 4P/6 chunks, equal to P/3 ranks' activations, are held at
// once.
#include <array>

#include "penstock/schedule/generate/v_block.h"

namespace penstock::schedule {

Schedule v_min(const PipelineShape& shape) {
  check_shape(ScheduleKind::VMin, shape);
  static constexpr std::array<VBlockOffsets, 1> kBlocks = {{{1, 1, 1, 1}}};
  return v_block_schedule(shape, kBlocks);
}

}  // namespace penstock::schedule
