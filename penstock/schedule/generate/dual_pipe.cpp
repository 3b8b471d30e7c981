// Bidirectional DualPipe: two copies of the model's P parts, run from both ends at once. Half of the
// microbatches enter at rank 0 and go up through copy 0, the other half enter at rank P-1 and go down through
// copy 1; forwards of one direction overlap backwards of the other. The schedule is symmetric: ranks at the
// same distance from their nearer end do the same.
#include <algorithm>

#include "penstock/generators.h"
#include "penstock/schedule/generate/dual_pipe_row.h"

namespace penstock::schedule {

Schedule dual_pipe(const PipelineShape& shape) {
  check_shape(ScheduleKind::DualPipe, shape);
  const int ranks = shape.ranks;
  const int half = shape.microbatches / 2;
  Schedule schedule(StageMap::make(StagePlacement::Bidirectional, ranks, 2 * ranks, shape.microbatches));
  for (int rank = 0; rank < ranks; ++rank) {
    const DualPipeSide up = {rank, 0};
    const DualPipeSide down = {2 * ranks - 1 - rank, half};
    const int position = std::min(rank, ranks - 1 - rank);
    const bool lower_half = rank < ranks / 2;
    schedule.row(rank) =
        dual_pipe_row(ranks / 2, position, half, lower_half ? up : down, lower_half ? down : up);
  }
  return schedule;
}

}  // namespace penstock::schedule
