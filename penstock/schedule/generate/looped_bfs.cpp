// Looped breadth-first: each chunk runs all microbatches forward before the next chunk starts; backward takes
// chunks and microbatches in reverse. Idle slots show the pipeline filling and the first backward coming
// back.
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
