// ZBV: two chunks per rank in V placement, backward split into I and W. Rank P-1 holds both stages of the
// turn, so its first backward can start right after the forwards; no rank is idle between its first and last
// action.
//
// With fewer than 2P - 1 microbatches the pattern is generated for 2P - 1 and the surplus becomes idle slots.
#include <algorithm>

#include "penstock/generators.h"

namespace penstock::schedule {

namespace {

// Writes one rank's row; microbatches beyond the real count leave idle slots.
class RowWriter {
 public:
  RowWriter(Row& row, int microbatches, int first_stage, int second_stage)
      : row_(row), microbatches_(microbatches), chunks_{{first_stage}, {second_stage}} {}

  void forward(int chunk) { push(ActionKind::Forward, chunk, chunks_[chunk].forwards++); }
  void input(int chunk) { push(ActionKind::BackwardInput, chunk, chunks_[chunk].inputs++); }
  void weight(int chunk) { push(ActionKind::BackwardWeight, chunk, chunks_[chunk].weights++); }
  void backward(int chunk) {
    input(chunk);
    weight(chunk);
  }
  int forwards(int chunk) const { return chunks_[chunk].forwards; }
  bool weights_pending(int chunk) const { return chunks_[chunk].weights < chunks_[chunk].inputs; }

 private:
  struct Chunk {
    int stage;
    int forwards = 0;
    int inputs = 0;
    int weights = 0;
  };

  void push(ActionKind kind, int chunk, int microbatch) {
    if (microbatch < microbatches_) {
      row_.push(Action(kind, chunks_[chunk].stage, microbatch));
    } else {
      row_.push_idle();
    }
  }

  Row& row_;
  int microbatches_;
  Chunk chunks_[2];
};

}  // namespace

Schedule zbv_zero_bubble(const PipelineShape& shape) {
  check_shape(ScheduleKind::ZBVZeroBubble, shape);
  const int ranks = shape.ranks;
  const int stages = 2 * ranks;
  const int microbatches = std::max(2 * ranks - 1, shape.microbatches);
  Schedule schedule(StageMap::make(StagePlacement::V, ranks, stages, shape.microbatches));
  for (int rank = 0; rank < ranks; ++rank) {
    Row& row = schedule.row(rank);
    row.reserve(static_cast<std::size_t>(rank) + 6 * static_cast<std::size_t>(microbatches));
    row.push_idle(static_cast<std::size_t>(rank));
    RowWriter write(row, shape.microbatches, rank, stages - 1 - rank);

    // Warm-up: fill the pipeline down and back up.
    for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) write.forward(0);
    for (int i = 0; i < rank; ++i) {
      write.forward(1);
      write.forward(0);
    }
    for (int i = 0; i < ranks - rank; ++i) {
      write.forward(1);
      write.backward(1);
    }
    // Steady phase: one forward and one backward of each chunk in turn.
    while (write.forwards(1) < write.forwards(0) || write.forwards(0) < microbatches) {
      if (write.forwards(0) < microbatches) write.forward(0);
      write.backward(0);
      write.forward(1);
      write.backward(1);
    }
    // Cool-down: input gradients first, since other ranks wait for them.
    for (int i = 0; i < rank; ++i) {
      write.input(0);
      write.input(1);
    }
    for (int i = 0; i < ranks - rank; ++i) write.backward(0);
    while (write.weights_pending(1)) write.weight(1);
    while (write.weights_pending(0)) write.weight(0);
  }
  return schedule;
}

}  // namespace penstock::schedule
