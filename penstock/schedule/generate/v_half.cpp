// V-Half: about half of 1F1B's activation memory. Two of the four legs take two steps per stage: a path of 6P
// steps, of which P chunks, equal to P/2 ranks' activations, are held at once. One slow leg belongs to the
// first chunk and one to the second, so that on every rank a longer lifetime of one chunk is offset by a
// shorter one of the other.
#include <array>

#include "penstock/schedule/generate/v_block.h"

namespace penstock::schedule {

Schedule v_half(const PipelineShape& shape) {
  check_shape(ScheduleKind::VHalf, shape);
  static constexpr std::array<VBlockOffsets, 4> kBlocks = {
      {{2, 1, 2, 1}, {1, 2, 1, 2}, {1, 1, 2, 2}, {2, 2, 1, 1}}};
  return v_block_schedule(shape, kBlocks);
}

}  // namespace penstock::schedule
