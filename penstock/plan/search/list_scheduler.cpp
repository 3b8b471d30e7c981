#include "penstock/plan/search/list_scheduler.h"

#include <algorithm>
#include <limits>
#include <queue>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/plan/cost/memory_ledger.h"

namespace penstock::plan {

namespace {

using schedule::Action;
using schedule::ActionKind;
using schedule::Chain;
using schedule::StageMap;

constexpr double kUnknown = std::numeric_limits<double>::infinity();
// Tolerance for sums of times that should be equal but differ in the last digits; without it an arrival "now"
// would be missed.
constexpr double kInstant = 1e-9;

struct StageProgress {
  int stage;
  int first_microbatch;
  int microbatches;
  std::int64_t later_bytes = 0;  // activation bytes of this rank's stages after this one
  int later_stages = 0;
  int forwards = 0;  // done so far; also the number of the next one
  int inputs = 0;
  int weights = 0;
  std::vector<double> activation;  // when the input of F becomes available; `gradient`: that of I
  std::vector<double> gradient;
};

struct RankProgress {
  std::vector<StageProgress> stages;
  MemoryLedger ledger;
  double free = 0;
  double wakes = kUnknown;  // time of the scheduled decision
  int open_weights = 0;
  std::int64_t gradients_to_come = 0;  // gradient bytes of stages without a weight gradient so far
};

// A possible next action of a rank on one of its stages.
struct Option {
  StageProgress* state = nullptr;
  double time = kUnknown;
};

class ListScheduler {
 public:
  ListScheduler(const StageMap& map, const CostModel& model, const std::vector<MemoryLimit>& limits,
                const std::vector<RankRule>& rules)
      : map_(map), model_(model), limits_(limits), rules_(rules), result_(map) {
    std::vector<std::vector<int>> stages_of(static_cast<std::size_t>(map.ranks()));
    for (int stage = 0; stage < map.stages(); ++stage) stages_of[at(map.rank_of(stage))].push_back(stage);
    place_.resize(at(map.stages()));
    left_.assign(at(map.ranks()), 0);
    link_free_.assign(2 * at(map.stages()), 0);
    ranks_.reserve(stages_of.size());
    for (int rank = 0; rank < map.ranks(); ++rank) {
      ranks_.push_back({{}, MemoryLedger(model, stages_of[at(rank)])});
      for (const int stage : stages_of[at(rank)]) add_stage(rank, stage);
      result_.row(rank).reserve(static_cast<std::size_t>(left_[at(rank)]));
    }
  }

  std::optional<ListScheduled> run() {
    for (int rank = 0; rank < map_.ranks(); ++rank) schedule_decision(rank, 0);
    while (!decisions_.empty()) {
      const auto [time, rank] = decisions_.top();
      decisions_.pop();
      RankProgress& state = ranks_[at(rank)];
      if (time != state.wakes) continue;  // replaced by an earlier one
      state.wakes = kUnknown;
      decide(rank, state, time);
    }
    double end = 0;
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      if (left_[at(rank)] > 0) return std::nullopt;
      end = std::max(end, ranks_[at(rank)].free);
    }
    return ListScheduled{std::move(result_), end};
  }

 private:
  static std::size_t at(int index) { return static_cast<std::size_t>(index); }

  void add_stage(int rank, int stage) {
    RankProgress& state = ranks_[at(rank)];
    const Chain& chain = map_.chain_of(stage);
    for (StageProgress& before : state.stages) {
      ++before.later_stages;
      before.later_bytes += model_.memory_of(stage).activation;
    }
    state.gradients_to_come += model_.memory_of(stage).gradients;
    place_[at(stage)] = {rank, state.stages.size()};
    const bool first = map_.is_first(stage);
    StageProgress fresh{stage, chain.first_microbatch, chain.microbatches};
    fresh.activation.assign(at(chain.microbatches), first ? 0 : kUnknown);
    fresh.gradient.assign(at(chain.microbatches), kUnknown);
    state.stages.push_back(std::move(fresh));
    left_[at(rank)] += 3 * chain.microbatches;
  }

  void schedule_decision(int rank, double time) {
    RankProgress& state = ranks_[at(rank)];
    const double when = std::max(time, state.free);
    if (when >= state.wakes) return;
    state.wakes = when;
    decisions_.push({when, rank});
  }

  // Returns whether memory and rule allow another F of this stage. Space is reserved for each later stage of
  // the rank: otherwise the forwards of its first stage could fill the memory that the last one needs in
  // order to free any.
  bool forward_allowed(int rank, const RankProgress& state, const StageProgress& stage) const {
    const int in_flight = state.ledger.activations() + 1 + stage.later_stages;
    if (in_flight > std::max(rules_[at(rank)].in_flight, static_cast<int>(state.stages.size()))) return false;
    const MemoryLimit& limit = limits_[at(rank)];
    if (limit.activations && in_flight > *limit.activations) return false;
    if (!limit.bytes) return true;
    return state.ledger.bytes() + state.gradients_to_come + model_.memory_of(stage.stage).activation +
               stage.later_bytes <=
           *limit.bytes;
  }

  void decide(int rank, RankProgress& state, double now) {
    Option forward, input, weight;
    for (StageProgress& stage : state.stages) {
      // Later stages first at equal times: their microbatches are closest to freeing memory.
      if (stage.forwards < stage.microbatches) {
        const double time = std::max(now, stage.activation[at(stage.forwards)]);
        if (time <= forward.time && time < kUnknown && forward_allowed(rank, state, stage))
          forward = {&stage, time};
      }
      if (stage.inputs < stage.forwards) {
        const double time = std::max(now, stage.gradient[at(stage.inputs)]);
        if (time <= input.time && time < kUnknown) input = {&stage, time};
      }
      if (stage.weights < stage.inputs) weight = {&stage, now};
    }
    const RankRule& rule = rules_[at(rank)];
    if (weight.state != nullptr && state.open_weights >= rule.open_weights)
      return perform(rank, state, *weight.state, ActionKind::BackwardWeight, now);
    const bool forward_now = forward.state != nullptr && forward.time <= now + kInstant;
    const bool input_now = input.state != nullptr && input.time <= now + kInstant;
    if (forward_now && (!input_now || state.ledger.activations() < rule.forward_first)) {
      return perform(rank, state, *forward.state, ActionKind::Forward, now);
    }
    if (input_now) return perform(rank, state, *input.state, ActionKind::BackwardInput, now);
    const double arrival = std::min(forward.time, input.time);
    if (weight.state != nullptr) {
      const double length = model_.time_of(ActionKind::BackwardWeight, weight.state->stage);
      if (arrival - now >= rule.patience * length)
        return perform(rank, state, *weight.state, ActionKind::BackwardWeight, now);
    }
    if (arrival < kUnknown) schedule_decision(rank, arrival);
    // Otherwise the rank sleeps until another rank sends it something.
  }

  void perform(int rank, RankProgress& state, StageProgress& stage, ActionKind kind, double now) {
    const int number = kind == ActionKind::Forward         ? stage.forwards
                       : kind == ActionKind::BackwardInput ? stage.inputs
                                                           : stage.weights;
    const Action action(kind, stage.stage, stage.first_microbatch + number);
    result_.row(rank).push(action);
    state.ledger.begin(action);
    state.ledger.end(action);
    const double end = now + model_.time_of(kind, stage.stage);
    state.free = end;
    --left_[at(rank)];
    switch (kind) {
      case ActionKind::Forward:
        ++stage.forwards;
        if (map_.is_last(stage.stage)) {
          stage.gradient[at(number)] = end;
        } else {
          deliver(rank, state, stage.stage, stage.stage + 1, number, end);
        }
        break;
      case ActionKind::BackwardInput:
        ++stage.inputs;
        ++state.open_weights;
        if (!map_.is_first(stage.stage)) deliver(rank, state, stage.stage, stage.stage - 1, number, end);
        break;
      default:
        if (stage.weights == 0) state.gradients_to_come -= model_.memory_of(stage.stage).gradients;
        ++stage.weights;
        --state.open_weights;
        break;
    }
    if (left_[at(rank)] > 0) schedule_decision(rank, state.free);
  }

  void deliver(int rank, RankProgress& state, int from, int to, int number, double end) {
    const auto [to_rank, index] = place_[at(to)];
    double arrival = end;
    if (to_rank != rank) {
      const int border = std::min(from, to);
      double& link_free = link_free_[2 * at(border) + (to > from ? 0 : 1)];
      const double start = std::max(end, link_free);
      link_free = start + model_.occupancy(border);
      arrival = start + model_.transfer_time(border);
      if (model_.communication == Communication::Blocking) state.free = arrival;
    }
    StageProgress& target = ranks_[at(to_rank)].stages[index];
    (to > from ? target.activation : target.gradient)[at(number)] = arrival;
    // The receiving rank decides again when this arrives, unless it has something to do earlier.
    if (to_rank != rank && left_[at(to_rank)] > 0) schedule_decision(to_rank, std::max(arrival, end));
  }

  struct Decision {
    double time;
    int rank;
    bool operator>(const Decision& other) const {
      return time != other.time ? time > other.time : rank > other.rank;
    }
  };

  const StageMap& map_;
  const CostModel& model_;
  const std::vector<MemoryLimit>& limits_;
  const std::vector<RankRule>& rules_;
  schedule::Schedule result_;
  std::vector<RankProgress> ranks_;
  std::vector<std::pair<int, std::size_t>> place_;  // [stage]: its rank and its index there
  std::vector<int> left_;                           // [rank]: remaining actions
  std::vector<double> link_free_;                   // [border, direction]
  std::priority_queue<Decision, std::vector<Decision>, std::greater<>> decisions_;
};

}  // namespace

std::optional<ListScheduled> list_schedule(const StageMap& stages, const CostModel& model,
                                           const std::vector<MemoryLimit>& limits,
                                           const std::vector<RankRule>& rules) {
  const auto ranks = static_cast<std::size_t>(stages.ranks());
  PENSTOCK_INVARIANT(limits.size() == ranks && rules.size() == ranks, "one limit and one rule per rank");
  return ListScheduler(stages, model, limits, rules).run();
}

}  // namespace penstock::plan
