// V-Min: a third of 1F1B's activation memory, the least that a V-shaped repetition allows. Every leg takes one step a
// stage: a way of 4P steps, of which 4P/6 chunks, P/3 shares of a rank, are held at once.
#include "penstock/schedule/v_block.h"

namespace penstock::schedule {

Schedule v_min(const PipelineShape& shape) {
  check_shape(ScheduleKind::VMin, shape);
  return v_block_schedule(shape, {.forward_down = 1, .forward_up = 1, .backward_down = 1, .backward_up = 1});
}

}  // namespace penstock::schedule
