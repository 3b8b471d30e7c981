#include "penstock/train/plan/live_activations.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>

namespace penstock::train {

namespace {

using schedule::Action;
using schedule::ActionKind;

class LiveActivations {
 public:
  LiveActivations(const Program& program, const schedule::StageMap& map, const KeptActivations& kept)
      : program_(program), map_(map), kept_(kept) {}

  std::int64_t peak() {
    const std::vector<Instruction>& all = program_.instructions;
    std::int64_t most = 0;
    for (std::size_t i = 0; i < all.size();) {
      std::size_t length = 1;
      if (all[i].kind == Instruction::Kind::Compute) {
        length = static_cast<std::size_t>(all[i].members);
        for (std::size_t member = 0; member < length; ++member) compute(all[i + member].action);
        if (kept_.knows_sent) free_sent();
      } else {
        transfer(all[i]);
      }
      most = std::max(most, bytes_);
      i += length;
    }
    return most;
  }

 private:
  // An action makes what it keeps and its result, and uses up what has arrived for it.
  void compute(const Action& action) {
    const plan::MicrobatchMemory memory =
        kept_.stages[static_cast<std::size_t>(action.stage())].of(*action.microbatch());
    const std::int64_t input = map_.is_first(action.stage()) ? 0 : kept_.border,
                       output = map_.is_last(action.stage()) ? 0 : kept_.border,
                       for_weights = memory.between_input_and_weight.value_or(memory.activation);
    switch (action.kind()) {
      case ActionKind::Forward:
        bytes_ += memory.activation - input + output;
        break;
      case ActionKind::Backward:
        bytes_ += input - output - memory.activation;
        break;
      case ActionKind::BackwardInput:
        bytes_ += input - output - memory.activation + for_weights;
        break;
      case ActionKind::BackwardWeight:
        bytes_ -= for_weights;
        break;
      default:
        break;
    }
  }

  // What is handed over on one rank stays the same tensor.
  void transfer(const Instruction& instruction) {
    if (instruction.kind == Instruction::Kind::Post) bytes_ += kept_.border;
    if (instruction.kind != Instruction::Kind::Send && instruction.kind != Instruction::Kind::Await) return;
    const Channel& channel = program_.channels[static_cast<std::size_t>(instruction.channel)];
    const bool is_gradient = channel.kind == Channel::Kind::Gradient;
    const int microbatch = *instruction.action.microbatch();
    if (instruction.kind == Instruction::Kind::Send) {
      ++unfinished_;
      if (!is_gradient) sent_.insert({channel.from_stage, microbatch});  // nothing answers a gradient
    } else if (is_gradient && sent_.erase({channel.to_stage, microbatch}) > 0) {
      bytes_ -= kept_.border;
      --unfinished_;
    }
  }

  void free_sent() {
    bytes_ -= unfinished_ * kept_.border;
    unfinished_ = 0;
    sent_.clear();
  }

  const Program& program_;
  const schedule::StageMap& map_;
  const KeptActivations& kept_;
  std::int64_t bytes_ = 0;
  std::int64_t unfinished_ = 0;         // transfers to other ranks
  std::set<std::pair<int, int>> sent_;  // outputs among them, by stage and microbatch
};

}  // namespace

std::int64_t peak_of_activations(const Program& program, const schedule::StageMap& map,
                                 const KeptActivations& kept) {
  return LiveActivations(program, map, kept).peak();
}

}  // namespace penstock::train
