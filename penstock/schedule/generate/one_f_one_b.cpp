// 1F1B: rank r runs P - r forwards, then alternates backwards and forwards, then runs the remaining
// backwards. It never holds more than P - r microbatches, however many there are.
#include <algorithm>

#include "penstock/generators.h"
#include "penstock/schedule/generate/virtual_pipeline.h"

namespace penstock::schedule {

Schedule one_f_one_b(const PipelineShape& shape) {
  check_shape(ScheduleKind::OneFOneB, shape);
  Schedule schedule(StageMap::make(StagePlacement::Loop, shape.ranks, shape.ranks, shape.microbatches));
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Row& row = schedule.row(rank);
    row.reserve(2 * static_cast<std::size_t>(shape.microbatches));
    const int in_flight = one_f_one_b_in_flight(rank, shape.ranks, shape.microbatches);
    for (int microbatch = 0; microbatch < in_flight; ++microbatch) row.push(forward(rank, microbatch));
    for (int microbatch = 0; microbatch < shape.microbatches; ++microbatch) {
      row.push(backward(rank, microbatch));
      if (in_flight + microbatch < shape.microbatches) row.push(forward(rank, in_flight + microbatch));
    }
  }
  return schedule;
}

}  // namespace penstock::schedule
