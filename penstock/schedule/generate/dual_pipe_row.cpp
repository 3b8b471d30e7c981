#include "penstock/schedule/generate/dual_pipe_row.h"

#include <array>
#include <deque>

namespace penstock::schedule {

namespace {

constexpr int kNear = 0;
constexpr int kFar = 1;

class DualPipeWriter {
 public:
  DualPipeWriter(Row& row, DualPipeSide near, DualPipeSide far) : row_(row) {
    sides_[kNear] = {near.stage, near.first_microbatch, near.first_microbatch};
    sides_[kFar] = {far.stage, far.first_microbatch, far.first_microbatch};
  }

  void forward(int side) { row_.push(next_forward(side)); }
  void backward(int side) { row_.push(next_backward(side, ActionKind::Backward)); }
  // Runs input gradients now; the weight gradients are queued for `weight`.
  void input(int side) {
    const Action action = next_backward(side, ActionKind::BackwardInput);
    row_.push(action);
    pending_.push_back(Action(ActionKind::BackwardWeight, action.stage(), *action.microbatch()));
  }
  void weight() {
    if (pending_.empty()) return;
    row_.push(pending_.front());
    pending_.pop_front();
  }
  void overlap(int forward_side, int backward_side) {
    const std::array<Action, 2> members = {next_forward(forward_side),
                                           next_backward(backward_side, ActionKind::Backward)};
    row_.push_slot(members);
  }

 private:
  struct Side {
    int stage;
    int forwards;
    int backwards;
  };

  Action next_forward(int side) {
    return Action(ActionKind::Forward, sides_[side].stage, sides_[side].forwards++);
  }
  Action next_backward(int side, ActionKind kind) {
    return Action(kind, sides_[side].stage, sides_[side].backwards++);
  }

  Row& row_;
  Side sides_[2];
  std::deque<Action> pending_;
};

}  // namespace

Row dual_pipe_row(int depth, int position, int microbatches, DualPipeSide near, DualPipeSide far) {
  Row row;
  row.reserve(6 * static_cast<std::size_t>(microbatches));
  DualPipeWriter write(row, near, far);
  const int to_turn = depth - position - 1;  // ranks between this one and the turn

  // 1: forwards of the near side until its first microbatch arrives back on the far side.
  for (int i = 0; i < 2 * to_turn; ++i) write.forward(kNear);
  // 2: forwards of both sides.
  for (int i = 0; i < position + 1; ++i) {
    write.forward(kNear);
    write.forward(kFar);
  }
  // 3: the first backwards of the far side, split so that input gradients are sent early.
  for (int i = 0; i < to_turn; ++i) {
    write.input(kFar);
    write.weight();
    write.forward(kFar);
  }
  // 4: the steady phase, a forward of one side overlapped with a backward of the other.
  const int steady = microbatches - 2 * depth + position + 1;
  for (int i = 0; i < steady; ++i) {
    if (i == 0 && to_turn == 0) {
      // At the turn the first pair does not overlap: its backward could not start earlier, and the next rank
      // waits for the forward.
      write.forward(kNear);
      write.backward(kFar);
    } else {
      write.overlap(kNear, kFar);
    }
    write.overlap(kFar, kNear);
  }
  // 5: the near side has no forwards left.
  for (int i = 0; i < to_turn; ++i) {
    write.backward(kFar);
    write.overlap(kFar, kNear);
  }
  // 6: backwards of both sides; the second half is split, so that weight gradients remain to fill the end.
  const int both = position + 1;
  bool split = false;
  const auto last_backward = [&](int side) {
    if (split) {
      write.input(side);
    } else {
      write.backward(side);
    }
  };
  for (int i = 0; i < both; ++i) {
    if (i == both / 2 && position % 2 == 1) split = true;
    last_backward(kFar);
    if (i == both / 2 && position % 2 == 0) split = true;
    last_backward(kNear);
  }
  // 7 and 8: the rest of the near side, then the weight gradients.
  for (int i = 0; i < to_turn; ++i) {
    write.weight();
    last_backward(kNear);
  }
  for (int i = 0; i < position + 1; ++i) write.weight();
  return row;
}

}  // namespace penstock::schedule
