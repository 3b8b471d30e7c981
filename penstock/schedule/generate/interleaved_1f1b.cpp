// Interleaved 1F1B: V chunks on every rank; microbatches pass through the chunks in groups. After the warm-up
// each forward is followed by a backward; backwards take the chunks in reverse order.
//
// Idle slots align the ranks: r slots before rank r can start; after the warm-up, the slots until the first
// backward reaches it; and one for each backward of the cool-down, where the other ranks still run a forward.
#include <algorithm>

#include "penstock/generators.h"
#include "penstock/schedule/generate/interleaved_order.h"
#include "penstock/schedule/generate/shape_check.h"

namespace penstock::schedule {

Schedule interleaved_1f1b(const PipelineShape& shape) {
  check_shape(ScheduleKind::Interleaved1F1B, shape);
  const int ranks = shape.ranks;
  const int chunks = shape.stages_per_rank;
  const int group = checked_group_size(ScheduleKind::Interleaved1F1B, shape);
  const InterleavedOrder order(shape.microbatches, chunks, group);
  Schedule schedule(StageMap::make(StagePlacement::Loop, ranks, ranks * chunks, shape.microbatches));
  for (int rank = 0; rank < ranks; ++rank) {
    Row& row = schedule.row(rank);
    const WarmUp counts = warm_up_counts(rank, ranks, chunks, shape.microbatches, group);
    const auto push_forward = [&](int step) {
      const TableEntry entry = order[step];
      row.push(forward(rank + entry.chunk * ranks, entry.microbatch));
    };
    const auto push_backward = [&](int step) {
      const TableEntry entry = order[step];
      row.push(backward(rank + backward_chunk(entry.chunk, chunks) * ranks, entry.microbatch));
    };
    // The first backward reaches rank r in slot V*P + 2(P-1-r).
    const int first_backward = chunks * ranks + 2 * (ranks - 1 - rank);
    const int until_backward = counts.warm_up == 0 ? 0 : std::max(0, first_backward - counts.warm_up - rank);
    row.reserve(static_cast<std::size_t>(rank + until_backward + 2 * counts.total + counts.warm_up));
    row.push_idle(static_cast<std::size_t>(rank));
    for (int step = 0; step < counts.warm_up; ++step) push_forward(step);
    row.push_idle(static_cast<std::size_t>(until_backward));
    for (int step = 0; step < counts.remaining; ++step) {
      push_forward(counts.warm_up + step);
      push_backward(step);
    }
    for (int step = counts.remaining; step < counts.total; ++step) {
      row.push_idle();
      push_backward(step);
    }
  }
  return schedule;
}

}  // namespace penstock::schedule
