// Interleaved zero bubble (with one chunk per rank: ZB1P): interleaved 1F1B with the backward split into I
// and W. Since an I takes half the time of a B, the first gradient arrives earlier: the warm-up grows by one
// forward per rank, where interleaved 1F1B needs two. Rank r starts its weight gradients r steps late, so
// that input gradients are sent without delay, and the remaining weight gradients fill the end.
#include <algorithm>
#include <vector>

#include "penstock/generators.h"
#include "penstock/schedule/generate/interleaved_order.h"
#include "penstock/schedule/generate/shape_check.h"

namespace penstock::schedule {

namespace {

Row split_backward_row(const PipelineShape& shape, int rank, int group) {
  const int ranks = shape.ranks;
  const int chunks = shape.stages_per_rank;
  const InterleavedOrder order(shape.microbatches, chunks, group);
  const int total = shape.microbatches * chunks;
  const int warm_up = std::min((chunks - 1) * group + (ranks - 1 - rank), total);
  Row row;
  const int until_backward = warm_up == 0 ? 0 : ranks - rank - 1;
  row.reserve(static_cast<std::size_t>(rank + until_backward) + 3 * static_cast<std::size_t>(total));
  const auto push = [&](ActionKind kind, int step) {
    const TableEntry entry = order[step];
    const int chunk = kind == ActionKind::Forward ? entry.chunk : backward_chunk(entry.chunk, chunks);
    row.push(Action(kind, rank + chunk * ranks, entry.microbatch));
  };
  row.push_idle(static_cast<std::size_t>(rank));
  for (int step = 0; step < warm_up; ++step) push(ActionKind::Forward, step);
  row.push_idle(static_cast<std::size_t>(until_backward));
  int weights = 0;
  for (int step = 0; step < total; ++step) {
    if (warm_up + step < total) push(ActionKind::Forward, warm_up + step);
    push(ActionKind::BackwardInput, step);
    if (step >= rank) push(ActionKind::BackwardWeight, weights++);
  }
  while (weights < total) push(ActionKind::BackwardWeight, weights++);
  return row;
}

// Shifts slots to the right where a forward would run before the step that computes its input: with few
// microbatches the rows above assume a fuller pipeline than there is. Only forwards are checked; once they
// are in time, so are the gradients.
Schedule delay_forwards(const Schedule& tight) {
  const StageMap& map = tight.stages();
  Schedule result(map);
  const auto microbatches = static_cast<std::size_t>(map.microbatches());
  // Forwards of a stage run in microbatch order, so a count is enough to know which ones are done.
  std::vector<int> forwards_done(static_cast<std::size_t>(map.stages()), 0);
  std::vector<std::size_t> next(static_cast<std::size_t>(map.ranks()), 0);
  std::vector<int> done_now;
  for (int rank = 0; rank < map.ranks(); ++rank)
    result.row(rank).reserve(tight.row(rank).size() + microbatches);
  for (bool running = true; running;) {
    running = false;
    done_now.clear();
    for (int rank = 0; rank < map.ranks(); ++rank) {
      std::size_t& position = next[static_cast<std::size_t>(rank)];
      const Row& row = tight.row(rank);
      if (position == row.size()) continue;
      running = true;
      const Slot slot = row[position];
      if (!slot.empty() && slot[0].kind() == ActionKind::Forward) {
        const int stage = slot[0].stage();
        const int microbatch = *slot[0].microbatch();
        if (stage > 0 && forwards_done[static_cast<std::size_t>(stage - 1)] <= microbatch) {
          result.row(rank).push_idle();
          continue;
        }
        done_now.push_back(stage);
      }
      result.row(rank).push_slot(slot);
      ++position;
    }
    // Visible from the next step on: within one step all ranks run in parallel.
    for (const int stage : done_now) ++forwards_done[static_cast<std::size_t>(stage)];
  }
  return result;
}

}  // namespace

Schedule interleaved_zero_bubble(const PipelineShape& shape) {
  check_shape(ScheduleKind::InterleavedZeroBubble, shape);
  const int group = checked_group_size(ScheduleKind::InterleavedZeroBubble, shape);
  Schedule tight(StageMap::make(StagePlacement::Loop, shape.ranks, shape.ranks * shape.stages_per_rank,
                                shape.microbatches));
  for (int rank = 0; rank < shape.ranks; ++rank) tight.row(rank) = split_backward_row(shape, rank, group);
  return delay_forwards(tight);
}

}  // namespace penstock::schedule
