// One step of a pipeline schedule: what is done (kind), on which stage, for which microbatch.
//
// An Action is an 8-byte value; a schedule of a thousand ranks holds tens of millions of them. Text form,
// exact in both directions: `<stage><kind><microbatch>`, for example 2F0, 1I3, 0SEND_F1, 3UNSHARD.
//
//   text         kind             meaning
//   F            Forward          forward of one microbatch
//   B            Backward         full backward: gradients of inputs and weights
//   I            BackwardInput    gradients of the stage's inputs only
//   W            BackwardWeight   gradients of the stage's weights, after the I of the same microbatch
//   SEND_F       SendForward      activation to the next stage; the stage named is the one that acts
//   RECV_F       RecvForward      activation from the previous stage
//   SEND_B       SendBackward     gradient to the previous stage
//   RECV_B       RecvBackward     gradient from the next stage
//   UNSHARD      Unshard          gather the stage's sharded parameters      (no microbatch)
//   RESHARD      Reshard          free the gathered parameters               (no microbatch)
//   REDUCE_GRAD  ReduceGrad       finish the stage's gradients of this step  (no microbatch)
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>


namespace penstock::schedule {

enum class ActionKind : std::uint8_t {
  Forward,
  Backward,
  BackwardInput,
  BackwardWeight,
  SendForward,
  RecvForward,
  SendBackward,
  RecvBackward,
  Unshard,
  Reshard,
  ReduceGrad,
};
inline constexpr int kActionKinds = 11;

// Bounds of the packed form; the text parser enforces them, the constructors check them.
inline constexpr std::int32_t kMaxStage = (1 << 24) - 1;
inline constexpr std::int32_t kMaxMicrobatch = (1 << 30) - 1;

class Row;

class Action {
 public:
  // Throws ValueError when a number is negative or above its bound.
  Action(ActionKind kind, int stage, int microbatch)
      : head_(static_cast<std::uint32_t>(stage) << 8 | kHasMicrobatch | static_cast<std::uint32_t>(kind)),
        tail_(static_cast<std::uint32_t>(microbatch)) {
    check(stage, microbatch);
  }
  Action(ActionKind kind, int stage)
      : head_(static_cast<std::uint32_t>(stage) << 8 | static_cast<std::uint32_t>(kind)), tail_(0) {
    check(stage, 0);
  }

  ActionKind kind() const { return static_cast<ActionKind>(head_ & 0xf); }
  int stage() const { return static_cast<int>(head_ >> 8); }
  bool has_microbatch() const { return (head_ & kHasMicrobatch) != 0; }
  std::optional<int> microbatch() const {
    if (!has_microbatch()) return std::nullopt;
    return static_cast<int>(tail_);
  }

  friend bool operator==(const Action&, const Action&) = default;

 private:
  friend class Row;
  friend struct std::hash<Action>;
  // Row packs its idle slots and overlaps into the same 8 bytes; no Action outside a Row ever carries these
  // tags.
  static constexpr std::uint32_t kHasMicrobatch = 0x10;
  static constexpr std::uint32_t kIdleTag = 0x20;
  static constexpr std::uint32_t kOverlapTag = 0x40;
  Action(std::uint32_t head, std::uint32_t tail) : head_(head), tail_(tail) {}

  static void check(int stage, int microbatch) {
    const bool good = stage >= 0 && stage <= kMaxStage && microbatch >= 0 && microbatch <= kMaxMicrobatch;
    if (!good) [[unlikely]]
      out_of_range(stage, microbatch);
  }
  [[noreturn]] static void out_of_range(int stage, int microbatch);

  std::uint32_t head_;  // kind: bits 0-3, flags: bits 4-6, stage: bits 8-31
  std::uint32_t tail_;  // microbatch, 0 when there is none
};
static_assert(sizeof(Action) == 8);

// F, B, I or W.
constexpr bool is_compute(ActionKind kind) {
  return kind <= ActionKind::BackwardWeight;
}
// B or I: produces the gradient that the previous stage waits for.
constexpr bool produces_input_gradient(ActionKind kind) {
  return kind == ActionKind::Backward || kind == ActionKind::BackwardInput;
}
// B or W: adds to the gradients of the weights.
constexpr bool produces_weight_gradient(ActionKind kind) {
  return kind == ActionKind::Backward || kind == ActionKind::BackwardWeight;
}
constexpr bool is_send(ActionKind kind) {
  return kind == ActionKind::SendForward || kind == ActionKind::SendBackward;
}
constexpr bool is_receive(ActionKind kind) {
  return kind == ActionKind::RecvForward || kind == ActionKind::RecvBackward;
}
// UNSHARD, RESHARD or REDUCE_GRAD: concerns a stage as a whole, never one microbatch.
constexpr bool is_stage_wide(ActionKind kind) {
  return kind >= ActionKind::Unshard;
}

// "F", "SEND_F", ...
std::string_view to_text(ActionKind kind);
// "2F0".
std::string to_text(const Action& action);
// What one slot of a row holds: "" when idle, "2F0", or "(0F4;3B1)OVERLAP_F_B" for two or more actions at
// once.
std::string to_text(std::span<const Action> slot);
void append_text(std::string& out, std::span<const Action> slot);

std::ostream& operator<<(std::ostream& out, const Action& action);

inline Action forward(int stage, int microbatch) {
  return {ActionKind::Forward, stage, microbatch};
}
inline Action backward(int stage, int microbatch) {
  return {ActionKind::Backward, stage, microbatch};
}
inline Action backward_input(int stage, int microbatch) {
  return {ActionKind::BackwardInput, stage, microbatch};
}
inline Action backward_weight(int stage, int microbatch) {
  return {ActionKind::BackwardWeight, stage, microbatch};
}

}  // namespace penstock::schedule

template <>
struct std::hash<penstock::schedule::Action> {
  std::size_t operator()(const penstock::schedule::Action& action) const noexcept {
    return std::hash<std::uint64_t>{}(static_cast<std::uint64_t>(action.head_) << 32 | action.tail_);
  }
};
