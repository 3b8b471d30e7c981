// V-Half: half of 1F1B's activation memory. The downward legs take two steps a stage: a way of 6P steps, of which P chunks,
// P/2 shares of a rank, are held at once.
#include "penstock/schedule/v_block.h"

namespace penstock::schedule {

Schedule v_half(const PipelineShape& shape) {
  check_shape(ScheduleKind::VHalf, shape);
  return v_block_schedule(shape, {.forward_down = 2, .forward_up = 1, .backward_down = 2, .backward_up = 1});
}

}  // namespace penstock::schedule
