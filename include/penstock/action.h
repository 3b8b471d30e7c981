// One action of a pipeline schedule: what is done (kind), on which stage, for which microbatch.
//
//   schedule::Action action = schedule::forward(2, 0);
//   std::cout << action;                                        // 2F0
//   schedule::Action gather(schedule::ActionKind::Unshard, 3);  // 3UNSHARD
//
// The text form is `<stage><kind><microbatch>`, for example 2F0, 1I3, 0SEND_F1, 3UNSHARD; it parses back to
// the same action (schedule.h). In a transfer, the stage is the one on the rank that acts: the sender's
// of a send, the receiver's of a receive.
//
//   text         kind             meaning
//   F            Forward          forward of one microbatch
//   B            Backward         full backward: gradients of inputs and weights
//   I            BackwardInput    gradients of the stage's inputs only
//   W            BackwardWeight   gradients of the stage's weights, after the I of the same microbatch
//   SEND_F       SendForward      send the activation to the next stage
//   RECV_F       RecvForward      receive the activation from the previous stage
//   SEND_B       SendBackward     send the gradient to the previous stage
//   RECV_B       RecvBackward     receive the gradient from the next stage
//   UNSHARD      Unshard          gather the stage's sharded parameters      (no microbatch)
//   RESHARD      Reshard          free the gathered parameters               (no microbatch)
//   REDUCE_GRAD  ReduceGrad       finish the stage's gradients of this step  (no microbatch)
//
// An Action takes 8 bytes, since the schedule of a thousand ranks has tens of millions of them.
//
// Thread safety: values; concurrent reads are safe.
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

// What an action does.
enum class ActionKind : std::uint8_t {
  Forward,         // F: forward of one microbatch
  Backward,        // B: full backward
  BackwardInput,   // I: gradients of the inputs only
  BackwardWeight,  // W: gradients of the weights only
  SendForward,     // SEND_F: activation to the next stage
  RecvForward,     // RECV_F: activation from the previous stage
  SendBackward,    // SEND_B: gradient to the previous stage
  RecvBackward,    // RECV_B: gradient from the next stage
  Unshard,         // UNSHARD: gather the stage's parameters
  Reshard,         // RESHARD: free the gathered parameters
  ReduceGrad,      // REDUCE_GRAD: finish the stage's gradients of this step
};
// Number of action kinds.
inline constexpr int kActionKinds = 11;

// Greatest stage of an action.
inline constexpr std::int32_t kMaxStage = (1 << 24) - 1;
// Greatest microbatch of an action.
inline constexpr std::int32_t kMaxMicrobatch = (1 << 30) - 1;

class Row;

// One action of a schedule. An 8-byte value.
class Action {
 public:
  // An action on one microbatch. Throws ValueError if a number is negative or above its maximum.
  Action(ActionKind kind, int stage, int microbatch)
      : head_(static_cast<std::uint32_t>(stage) << 8 | kHasMicrobatch | static_cast<std::uint32_t>(kind)),
        tail_(static_cast<std::uint32_t>(microbatch)) {
    check(stage, microbatch);
  }
  // An action on the stage as a whole. Throws ValueError if the stage is negative or above kMaxStage.
  Action(ActionKind kind, int stage)
      : head_(static_cast<std::uint32_t>(stage) << 8 | static_cast<std::uint32_t>(kind)), tail_(0) {
    check(stage, 0);
  }

  // What is done.
  ActionKind kind() const { return static_cast<ActionKind>(head_ & 0xf); }
  // The stage that acts.
  int stage() const { return static_cast<int>(head_ >> 8); }
  // Whether the action is for one microbatch.
  bool has_microbatch() const { return (head_ & kHasMicrobatch) != 0; }
  // The microbatch, or std::nullopt for an action on the stage as a whole.
  std::optional<int> microbatch() const {
    if (!has_microbatch()) return std::nullopt;
    return static_cast<int>(tail_);
  }

  // Compares kind, stage and microbatch.
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

// Whether the kind is F, B, I or W.
constexpr bool is_compute(ActionKind kind) { return kind <= ActionKind::BackwardWeight; }
// Whether the kind is B or I, which produce the gradient that the previous stage waits for.
constexpr bool produces_input_gradient(ActionKind kind) {
  return kind == ActionKind::Backward || kind == ActionKind::BackwardInput;
}
// Whether the kind is B or W, which add to the gradients of the weights.
constexpr bool produces_weight_gradient(ActionKind kind) {
  return kind == ActionKind::Backward || kind == ActionKind::BackwardWeight;
}
// Whether the kind is SEND_F or SEND_B.
constexpr bool is_send(ActionKind kind) {
  return kind == ActionKind::SendForward || kind == ActionKind::SendBackward;
}
// Whether the kind is RECV_F or RECV_B.
constexpr bool is_receive(ActionKind kind) {
  return kind == ActionKind::RecvForward || kind == ActionKind::RecvBackward;
}
// Whether the kind is UNSHARD, RESHARD or REDUCE_GRAD, which concern a stage as a whole, not one microbatch.
constexpr bool is_stage_wide(ActionKind kind) { return kind >= ActionKind::Unshard; }

// Returns "F", "SEND_F", ...
std::string_view to_text(ActionKind kind);
// Returns "2F0".
std::string to_text(const Action& action);
// Returns the text of one slot of a row: "" if idle, "2F0" for one action, "(0F4;3B1)OVERLAP_F_B" for two or
// more actions that overlap.
std::string to_text(std::span<const Action> slot);
// Appends to_text(slot) to `out`.
void append_text(std::string& out, std::span<const Action> slot);

// Writes to_text(action).
std::ostream& operator<<(std::ostream& out, const Action& action);

// Returns the F of a stage and a microbatch. Throws as the constructor of Action; so do the next three.
inline Action forward(int stage, int microbatch) { return {ActionKind::Forward, stage, microbatch}; }
// Returns the B of a stage and a microbatch.
inline Action backward(int stage, int microbatch) { return {ActionKind::Backward, stage, microbatch}; }
// Returns the I of a stage and a microbatch.
inline Action backward_input(int stage, int microbatch) {
  return {ActionKind::BackwardInput, stage, microbatch};
}
// Returns the W of a stage and a microbatch.
inline Action backward_weight(int stage, int microbatch) {
  return {ActionKind::BackwardWeight, stage, microbatch};
}

}  // namespace penstock::schedule

// Hash that agrees with operator==.
template <>
struct std::hash<penstock::schedule::Action> {
  // Returns the hash of an action.
  std::size_t operator()(const penstock::schedule::Action& action) const noexcept {
    return std::hash<std::uint64_t>{}(static_cast<std::uint64_t>(action.head_) << 32 | action.tail_);
  }
};
