// Looped breadth-first: each chunk runs the forwards of all microbatches before the next chunk starts;
// backwards take chunks and microbatches in reverse order. Idle slots mark the filling of the pipeline and
// the wait for the first backward.
#include "penstock/generators.h"

namespace penstock::schedule {

Schedule looped_bfs(const PipelineShape& shape) {
  check_shape(ScheduleKind::LoopedBFS, shape);
  const int stages = shape.ranks * shape.stages_per_rank;
  Schedule schedule(StageMap::make(StagePlacement::Loop, shape.ranks, stages, shape.microbatches));
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Row& row = schedule.row(rank);
    const int until_backward = 2 * (shape.ranks - 1 - rank);
    row.reserve(2 * static_cast<std::size_t>(shape.stages_per_rank) *
                    static_cast<std::size_t>(shape.microbatches) +
                static_cast<std::size_t>(rank + until_backward));
    row.push_idle(static_cast<std::size_t>(rank));
    for (int chunk = 0; chunk < shape.stages_per_rank; ++chunk) {
      for (int microbatch = 0; microbatch < shape.microbatches; ++microbatch) {
        row.push(forward(rank + chunk * shape.ranks, microbatch));
      }
    }
    row.push_idle(static_cast<std::size_t>(until_backward));
    for (int chunk = shape.stages_per_rank - 1; chunk >= 0; --chunk) {
      for (int microbatch = shape.microbatches - 1; microbatch >= 0; --microbatch) {
        row.push(backward(rank + chunk * shape.ranks, microbatch));
      }
    }
  }
  return schedule;
}

}  // namespace penstock::schedule
