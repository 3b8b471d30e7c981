// Tracks what one rank holds while it executes its row: activations in flight and bytes, current and peak.
//
// Call `begin` and `end` for every action, in row order. The simulator and `auto` both use it, so that a
// limit means the same to both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "penstock/cost_model.h"

namespace penstock::plan {

class MemoryLedger {
 public:
  // `stages`: the stages of the rank.
  MemoryLedger(const CostModel& model, const std::vector<int>& stages) : model_(&model) {
    for (const int stage : stages) bytes_ += model.memory_of(stage).parameters;
    has_gradients_.assign(stages.empty() ? 0 : static_cast<std::size_t>(stages.back()) + 1, false);
    peak_bytes_ = bytes_;
  }

  void begin(const schedule::Action& action) {
    const int stage = action.stage();
    const StageMemory& memory = model_->memory_of(stage);
    switch (action.kind()) {
      case schedule::ActionKind::Forward:
        ++activations_;
        bytes_ += kept(memory, action).activation;
        break;
      case schedule::ActionKind::Backward:
        add_gradients(stage, memory);
        break;
      case schedule::ActionKind::BackwardInput:
        bytes_ += std::max<std::int64_t>(0, growth_by_input(kept(memory, action)));
        break;
      case schedule::ActionKind::BackwardWeight:
        add_gradients(stage, memory);
        break;
      case schedule::ActionKind::Unshard:
        bytes_ += memory.unsharded;
        break;
      default:
        return;
    }
    peak_activations_ = std::max(peak_activations_, activations_);
    peak_bytes_ = std::max(peak_bytes_, bytes_);
  }

  void end(const schedule::Action& action) {
    const StageMemory& memory = model_->memory_of(action.stage());
    switch (action.kind()) {
      case schedule::ActionKind::Backward:
        --activations_;
        bytes_ -= kept(memory, action).activation;
        break;
      case schedule::ActionKind::BackwardInput:
        bytes_ += std::min<std::int64_t>(0, growth_by_input(kept(memory, action)));
        break;
      case schedule::ActionKind::BackwardWeight:
        --activations_;
        bytes_ -= after_input(kept(memory, action));
        break;
      case schedule::ActionKind::Reshard:
        bytes_ -= memory.unsharded;
        break;
      default:
        break;
    }
  }

  // Microbatches of the rank's stages whose F has started and whose B or W has not ended.
  int activations() const { return activations_; }
  std::int64_t bytes() const { return bytes_; }
  int peak_activations() const { return peak_activations_; }
  std::int64_t peak_bytes() const { return peak_bytes_; }

 private:
  // Of an action of a microbatch: F, B, I or W.
  static MicrobatchMemory kept(const StageMemory& memory, const schedule::Action& action) {
    return memory.of(*action.microbatch());
  }
  static std::int64_t after_input(const MicrobatchMemory& memory) {
    return memory.between_input_and_weight.value_or(memory.activation);
  }
  static std::int64_t growth_by_input(const MicrobatchMemory& memory) {
    return after_input(memory) - memory.activation;
  }
  void add_gradients(int stage, const StageMemory& memory) {
    if (has_gradients_[static_cast<std::size_t>(stage)]) return;
    has_gradients_[static_cast<std::size_t>(stage)] = true;
    bytes_ += memory.gradients;
  }

  const CostModel* model_;
  std::vector<bool> has_gradients_;
  int activations_ = 0;
  int peak_activations_ = 0;
  std::int64_t bytes_ = 0;
  std::int64_t peak_bytes_ = 0;
};

}  // namespace penstock::plan
