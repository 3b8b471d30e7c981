// ZB2P: one stage per rank, backward split into I and W, up to 2P - 1 microbatches in flight. At twice the
// memory of 1F1B the rows have no gaps: rank r starts r steps after rank 0 and then is never idle.
//
// Built by list scheduling at equal costs, step by step: an input gradient that is ready runs first, since
// other ranks wait for it; otherwise a forward, if the limit allows one more; otherwise a weight gradient,
// which no rank waits for.
#include <vector>

#include "penstock/generators.h"

namespace penstock::schedule {

namespace {

struct RankProgress {
  int forwards = 0;
  int inputs = 0;
  int weights = 0;
};

}  // namespace

Schedule zb2p(const PipelineShape& shape) {
  check_shape(ScheduleKind::ZB2P, shape);
  const int ranks = shape.ranks;
  const int microbatches = shape.microbatches;
  const int limit = 2 * ranks - 1;
  Schedule schedule(StageMap::make(StagePlacement::Loop, ranks, ranks, microbatches));
  for (int rank = 0; rank < ranks; ++rank) {
    schedule.row(rank).reserve(3 * static_cast<std::size_t>(microbatches) + static_cast<std::size_t>(rank));
  }
  // What each rank had done before the current step: within a step all ranks run in parallel.
  std::vector<RankProgress> before(static_cast<std::size_t>(ranks));
  std::vector<RankProgress> now = before;
  for (int unfinished = ranks; unfinished > 0;) {
    for (int rank = 0; rank < ranks; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      RankProgress& mine = now[r];
      if (mine.weights == microbatches) continue;
      const int gradients_here = rank == ranks - 1 ? mine.forwards : before[r + 1].inputs;
      const int activations_here = rank == 0 ? microbatches : before[r - 1].forwards;
      Row& row = schedule.row(rank);
      if (mine.inputs < gradients_here && mine.inputs < mine.forwards) {
        row.push(backward_input(rank, mine.inputs++));
      } else if (mine.forwards < activations_here && mine.forwards - mine.weights < limit) {
        row.push(forward(rank, mine.forwards++));
      } else if (mine.weights < mine.inputs) {
        row.push(backward_weight(rank, mine.weights++));
        if (mine.weights == microbatches) --unfinished;
      } else {
        row.push_idle();
      }
    }
    before = now;
  }
  return schedule;
}

}  // namespace penstock::schedule
