// GPipe: all forwards, then all backwards, both in microbatch order. Holds all activations at once.
#include "penstock/generators.h"

namespace penstock::schedule {

Schedule gpipe(const PipelineShape& shape) {
  check_shape(ScheduleKind::GPipe, shape);
  Schedule schedule(StageMap::make(StagePlacement::Loop, shape.ranks, shape.ranks, shape.microbatches));
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Row& row = schedule.row(rank);
    row.reserve(2 * static_cast<std::size_t>(shape.microbatches));
    for (int microbatch = 0; microbatch < shape.microbatches; ++microbatch)
      row.push(forward(rank, microbatch));
    for (int microbatch = 0; microbatch < shape.microbatches; ++microbatch)
      row.push(backward(rank, microbatch));
  }
  return schedule;
}

}  // namespace penstock::schedule
