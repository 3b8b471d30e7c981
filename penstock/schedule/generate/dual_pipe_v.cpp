// DualPipeV: DualPipe folded into a V. Two chunks per rank; forwards of one chunk overlap backwards of the
// other.
#include "penstock/generators.h"
#include "penstock/schedule/generate/dual_pipe_row.h"

namespace penstock::schedule {

Schedule dual_pipe_v(const PipelineShape& shape) {
  check_shape(ScheduleKind::DualPipeV, shape);
  const int stages = 2 * shape.ranks;
  Schedule schedule(StageMap::make(StagePlacement::V, shape.ranks, stages, shape.microbatches));
  for (int rank = 0; rank < shape.ranks; ++rank) {
    schedule.row(rank) =
        dual_pipe_row(shape.ranks, rank, shape.microbatches, {rank, 0}, {stages - 1 - rank, 0});
  }
  return schedule;
}

}  // namespace penstock::schedule
