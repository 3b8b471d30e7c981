#include "penstock/cost_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::plan {

using schedule::ActionKind;

double CostModel::time_of(ActionKind kind, int stage) const {
  const StageCost& cost = cost_of(stage);
  switch (kind) {
    case ActionKind::Forward:
      return cost.forward;
    case ActionKind::Backward:
      return cost.backward.value_or(cost.backward_input + cost.backward_weight);
    case ActionKind::BackwardInput:
      return cost.backward_input;
    case ActionKind::BackwardWeight:
      return cost.backward_weight;
    case ActionKind::Unshard:
      return cost.unshard;
    case ActionKind::ReduceGrad:
      return cost.reduce_grad;
    case ActionKind::SendForward:
    case ActionKind::RecvForward:
    case ActionKind::SendBackward:
    case ActionKind::RecvBackward:
    case ActionKind::Reshard:
      return 0;
  }
  return 0;
}

double CostModel::time_of(schedule::Slot slot) const {
  double sum = 0;
  double longest = 0;
  for (const schedule::Action& action : slot) {
    const double time = time_of(action.kind(), action.stage());
    sum += time;
    longest = std::max(longest, time);
  }
  return sum - overlap_saving * (sum - longest);
}

void CostModel::check(int stage_count) const {
  const auto check_entries = [&](const char* what, std::size_t entries) {
    if (entries == 1 || entries == static_cast<std::size_t>(stage_count)) return;
    throw ValueError(describe(fmt::format("cost model: entries of {}", what), fmt::format("{}", entries),
                              fmt::format("1 or one for each of {} stages", stage_count)));
  };
  check_entries("stages", stages.size());
  check_entries("memory", memory.size());
  const auto check_time = [](const char* what, std::size_t stage, double value) {
    if (value >= 0 && value <= kLongestTime) return;
    throw ValueError(describe(fmt::format("cost model: {} of stage {}", what, stage),
                              fmt::format("{}", value), fmt::format("a number from 0 to {}", kLongestTime),
                              "choose a longer unit of time"));
  };
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    const StageCost& cost = stages[stage];
    check_time("forward", stage, cost.forward);
    check_time("backward_input", stage, cost.backward_input);
    check_time("backward_weight", stage, cost.backward_weight);
    check_time("backward", stage, cost.backward.value_or(0));
    check_time("output_bytes", stage, cost.output_bytes);
    check_time("unshard", stage, cost.unshard);
    check_time("reduce_grad", stage, cost.reduce_grad);
  }
  for (std::size_t stage = 0; stage < memory.size(); ++stage) {
    const StageMemory& bytes = memory[stage];
    std::int64_t least = std::min({bytes.parameters, bytes.unsharded, bytes.gradients, bytes.activation,
                                   bytes.between_input_and_weight.value_or(0)});
    for (const auto& [microbatch, other] : bytes.exceptions)
      least = std::min({least, other.activation, other.between_input_and_weight.value_or(0)});
    if (least < 0) {
      throw ValueError(describe(fmt::format("cost model: memory of stage {}", stage),
                                fmt::format("{} bytes", least), "at least 0 bytes"));
    }
  }
  check_time("latency", 0, latency);
  if (!(bandwidth > 0)) {
    throw ValueError(describe("cost model: bandwidth", fmt::format("{}", bandwidth),
                              "a positive number of bytes per unit of time"));
  }
  // A finite size over a tiny bandwidth may overflow to infinity.
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    check_time("transfer time", stage, stages[stage].output_bytes / bandwidth);
  if (!(overlap_saving >= 0 && overlap_saving <= 1)) {
    throw ValueError(
        describe("cost model: overlap_saving", fmt::format("{}", overlap_saving), "a share from 0 to 1"));
  }
}

void CostModel::check(const schedule::StageMap& map, int microbatches) const {
  check(map.stages());
  // An upper bound is enough; doubles do not overflow here.
  std::vector<double> most(static_cast<std::size_t>(map.ranks()), 0.0);
  for (int stage = 0; stage < map.stages(); ++stage) {
    const StageMemory& bytes = memory_of(stage);
    std::int64_t largest = std::max(bytes.activation, bytes.between_input_and_weight.value_or(0));
    for (const auto& [microbatch, other] : bytes.exceptions)
      largest = std::max({largest, other.activation, other.between_input_and_weight.value_or(0)});
    const auto kept = static_cast<double>(largest);
    double& rank = most[static_cast<std::size_t>(map.rank_of(stage))];
    rank += static_cast<double>(bytes.parameters) + static_cast<double>(bytes.unsharded) +
            static_cast<double>(bytes.gradients) + kept * microbatches;
    if (rank >= 0x1p62)
      throw ValueError(describe(
          fmt::format("cost model: memory of a rank with {} microbatches", microbatches),
          fmt::format("up to {:.3g} bytes", rank), "less than 4 EiB", "lower the bytes of the stages"));
  }
}

CostModel split_evenly(const CostModel& model, int parts) {
  CostModel result = model;
  for (StageCost& cost : result.stages) {
    cost.forward /= parts;
    cost.backward_input /= parts;
    cost.backward_weight /= parts;
    if (cost.backward) *cost.backward /= parts;
    cost.unshard /= parts;
    cost.reduce_grad /= parts;
  }
  for (StageMemory& bytes : result.memory) {
    bytes.parameters /= parts;
    bytes.unsharded /= parts;
    bytes.gradients /= parts;
    bytes.activation /= parts;
    if (bytes.between_input_and_weight) *bytes.between_input_and_weight /= parts;
    for (auto& [microbatch, other] : bytes.exceptions) {
      other.activation /= parts;
      if (other.between_input_and_weight) *other.between_input_and_weight /= parts;
    }
  }
  return result;
}

}  // namespace penstock::plan
