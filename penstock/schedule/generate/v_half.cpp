// V-Half: about half of 1F1B's activation memory. Two of the four legs take two steps a stage: a way of 6P
// steps, of which P chunks, P/2 shares of a rank, are held at once. One slow leg is the first chunk's and one
// the second's, so that what one chunk holds longer the other holds shorter on every rank.
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
