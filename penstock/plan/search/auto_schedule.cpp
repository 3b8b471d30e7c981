#include "penstock/auto_schedule.h"
#include "penstock/plan/search/list_scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/lower.h"
#include "penstock/plan/search/critical_swaps.h"
#include "penstock/schedule/generate/virtual_pipeline.h"
#include "penstock/validate.h"

namespace penstock::plan {

namespace {

using schedule::Schedule;
using schedule::ScheduleKind;
using schedule::StageMap;
using schedule::StagePlacement;

// An order counts as faster only if the difference exceeds rounding errors.
constexpr double kGain = 1e-9;
// Bounds orders tried times actions per order: large pipelines get fewer trials, so that a search takes
// seconds.
constexpr std::int64_t kActionsTried = 10'000'000;
constexpr int kLeastTrials = 12;  // the starting rules

const MemoryLimit& limit_of(const std::vector<MemoryLimit>& limits, std::size_t rank) {
  static const MemoryLimit kNone;
  return limits.empty() ? kNone : limits[limits.size() == 1 ? 0 : rank];
}

struct Best {
  std::optional<Schedule> schedule;
  double time = 0;

  bool improves(double other) const { return !schedule || other < time * (1 - kGain); }
};

// Hill climbing from several starting rules for one placement.
class RuleSearch {
 public:
  RuleSearch(const AutoRequest& request, StageMap map)
      : request_(request), map_(std::move(map)), ranks_(static_cast<std::size_t>(map_.ranks())), random_(1) {
    for (std::size_t rank = 0; rank < ranks_; ++rank) limits_.push_back(limit_of(request.limits, rank));
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      const int most = request.shape.microbatches * request.shape.stages_per_rank;
      most_in_flight_.push_back(std::clamp(limits_[rank].activations.value_or(most), 1, most));
    }
  }

  void run(Best& best) {
    for (const double patience : {0.0, 0.5, 1.0}) {
      for (const bool eager : {false, true}) {
        for (const bool tapered : {false, true}) try_rules(uniform_rules(patience, eager, tapered), best);
      }
    }
    while (trials_ < request_.trials && !rules_.empty()) {
      std::vector<RankRule> rules = rules_;
      const int changes = 1 + pick(3);
      for (int i = 0; i < changes; ++i) mutate(rules);
      try_rules(rules, best);
    }
  }

 private:
  int pick(int count) { return static_cast<int>(random_() % static_cast<std::uint32_t>(count)); }

  // `eager`: forwards first until the limit is reached. `tapered`: one microbatch less in flight on each
  // successive rank, as in 1F1B.
  std::vector<RankRule> uniform_rules(double patience, bool eager, bool tapered) const {
    std::vector<RankRule> rules(ranks_);
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      const int depth = static_cast<int>(ranks_ - rank) * request_.shape.stages_per_rank;
      rules[rank].in_flight = tapered ? std::min(most_in_flight_[rank], depth) : most_in_flight_[rank];
      rules[rank].forward_first = eager ? rules[rank].in_flight : 0;
      rules[rank].patience = patience;
    }
    return rules;
  }

  // Changes one number of one rank, occasionally of all ranks.
  void mutate(std::vector<RankRule>& rules) {
    constexpr double kPatience[] = {0, 0.1, 0.25, 0.5, 0.75, 1, 1.5};
    const bool everywhere = pick(8) == 0;
    const std::size_t chosen = static_cast<std::size_t>(pick(static_cast<int>(ranks_)));
    const int what = pick(4);
    const double patience = kPatience[pick(7)];
    const double share = static_cast<double>(pick(101)) / 100;
    const int open = pick(5) == 0 ? 1 << 30 : 1 + pick(6);
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      if (!everywhere && rank != chosen) continue;
      const int level = 1 + static_cast<int>(share * (most_in_flight_[rank] - 1) + 0.5);
      switch (what) {
        case 0:
          rules[rank].in_flight = level;
          break;
        case 1:
          rules[rank].forward_first = share < 0.3 ? 0 : level;
          break;
        case 2:
          rules[rank].patience = patience;
          break;
        default:
          rules[rank].open_weights = open;
          break;
      }
    }
  }

  // Candidate rules are ranked by the list scheduler's own clock; the result is judged by the simulator's.
  void try_rules(const std::vector<RankRule>& rules, Best& best) {
    ++trials_;
    auto candidate = list_schedule(map_, request_.model, limits_, rules);
    if (!candidate) return;
    if (rules_.empty() || candidate->time <= climbed_ * (1 + kGain)) {
      rules_ = rules;
      climbed_ = candidate->time;
    }
    if (!best.improves(candidate->time)) return;
    consider(std::move(candidate->schedule), best);
  }

  void consider(Schedule schedule, Best& best) {
    const Simulation split = simulate(schedule, request_.model);
    if (fits(split, request_.limits) && best.improves(split.time)) {
      best.time = split.time;
      best.schedule = schedule;
    }
    // If a full backward is cheaper than its halves, an I followed by its W is better merged.
    Schedule merged(schedule.stages());
    for (int rank = 0; rank < schedule.ranks(); ++rank)
      merged.row(rank) = schedule::merge_backward(schedule.row(rank));
    const Simulation whole = simulate(merged, request_.model);
    if (fits(whole, request_.limits) && best.improves(whole.time)) {
      best.time = whole.time;
      best.schedule = std::move(merged);
    }
  }

  const AutoRequest& request_;
  StageMap map_;
  std::size_t ranks_;
  std::mt19937 random_;
  std::vector<MemoryLimit> limits_;
  std::vector<int> most_in_flight_;
  std::vector<RankRule> rules_;
  double climbed_ = 0;
  int trials_ = 0;
};

void check_request(const AutoRequest& request) {
  const schedule::PipelineShape& shape = request.shape;
  schedule::check_shape(ScheduleKind::LoopedBFS,
                        {shape.ranks, shape.stages_per_rank, shape.microbatches, std::nullopt});
  // The placement is not decided yet, so check as if one rank had all stages.
  request.model.check(
      schedule::StageMap(1,
                         std::vector<int>(static_cast<std::size_t>(shape.ranks * shape.stages_per_rank), 0),
                         shape.microbatches),
      shape.microbatches);
  if (request.limits.size() > 1 && request.limits.size() != static_cast<std::size_t>(shape.ranks)) {
    throw ValueError(describe("auto: memory limits", fmt::format("{}", request.limits.size()),
                              fmt::format("none, 1 or one for each of {} ranks", shape.ranks)));
  }
  if (request.trials < 1)
    throw ValueError(describe("auto: trials", fmt::format("{}", request.trials), "at least 1"));
  if (request.placements.empty()) throw ValueError("auto: no placement; expected at least one of loop and v");
}

[[noreturn]] void nothing_fits(const AutoRequest& request) {
  // Running one microbatch after the other needs the least memory.
  CostModel model = request.model;
  Schedule serial(StageMap::make(StagePlacement::Loop, request.shape.ranks,
                                 request.shape.ranks * request.shape.stages_per_rank,
                                 request.shape.microbatches));
  for (int rank = 0; rank < request.shape.ranks; ++rank) {
    const std::vector<int> stages = serial.stages().stages_of(rank);
    for (int microbatch = 0; microbatch < request.shape.microbatches; ++microbatch) {
      for (const int stage : stages) serial.row(rank).push(schedule::forward(stage, microbatch));
      for (auto stage = stages.rbegin(); stage != stages.rend(); ++stage)
        serial.row(rank).push(schedule::backward(*stage, microbatch));
    }
  }
  const Simulation least = simulate(serial, model);
  throw ValueError(describe(
      "auto: memory limit", "a limit that no schedule found meets",
      fmt::format("at least {} activations and {} per rank, which one microbatch at a time needs",
                  least.peak_activations(), format_bytes(static_cast<std::uint64_t>(least.peak_bytes()))),
      "raise the limit or use more ranks"));
}

}  // namespace

std::vector<MemoryLimit> one_f_one_b_limits(int ranks, int microbatches) {
  std::vector<MemoryLimit> limits;
  for (int rank = 0; rank < ranks; ++rank)
    limits.push_back({schedule::one_f_one_b_in_flight(rank, ranks, microbatches), std::nullopt});
  return limits;
}

bool fits(const Simulation& simulation, const std::vector<MemoryLimit>& limits) {
  for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const MemoryLimit& limit = limit_of(limits, rank);
    if (limit.activations && simulation.ranks[rank].peak_activations > *limit.activations) return false;
    if (limit.bytes && simulation.ranks[rank].peak_bytes > *limit.bytes) return false;
  }
  return true;
}

AutoResult auto_schedule(const AutoRequest& asked) {
  check_request(asked);
  AutoRequest request = asked;
  const std::int64_t actions =
      std::int64_t{3} * asked.shape.ranks * asked.shape.stages_per_rank * asked.shape.microbatches;
  request.trials = static_cast<int>(
      std::clamp<std::int64_t>(kActionsTried / actions, kLeastTrials, std::max(asked.trials, kLeastTrials)));
  request.trials = std::min(request.trials, asked.trials);
  const schedule::PipelineShape& shape = request.shape;
  std::vector<StagePlacement> placements;
  for (const StagePlacement placement : request.placements) {
    if (placement == StagePlacement::Bidirectional ||
        (placement == StagePlacement::V && shape.stages_per_rank != 2))
      continue;
    placements.push_back(placement);
  }
  if (placements.empty()) {
    throw ValueError(describe("auto: placement v", fmt::format("{} stages per rank", shape.stages_per_rank),
                              "2", "allow the loop placement too"));
  }

  Best best;
  std::optional<ScheduleKind> best_fixed;
  for (const ScheduleKind kind : schedule::all_schedule_kinds()) {
    if (std::find(placements.begin(), placements.end(), placement_of(kind)) == placements.end()) continue;
    try {
      schedule::check_shape(kind, shape);
    } catch (const ValueError&) {
      continue;  // the kind does not exist for this shape
    }
    Schedule fixed = generate(kind, shape);
    const Simulation simulation = simulate(fixed, request.model);
    if (!fits(simulation, request.limits) || !best.improves(simulation.time)) continue;
    best.time = simulation.time;
    best.schedule = std::move(fixed);
    best_fixed = kind;
  }
  const double fixed_time = best.time;
  for (const StagePlacement placement : placements) {
    RuleSearch(request, StageMap::make(placement, shape.ranks, shape.ranks * shape.stages_per_rank,
                                       shape.microbatches))
        .run(best);
  }
  if (!best.schedule) nothing_fits(request);
  // Start from the best order of the rules and from the best fixed one: they may lead to different local
  // optima.
  std::vector<Schedule> starts = {*best.schedule};
  if (best_fixed && best.time < fixed_time) starts.push_back(generate(*best_fixed, shape));
  for (const Schedule& start : starts) {
    Schedule improved = improve_by_swaps(start, request.model, request.limits, request.trials, 1);
    const Simulation simulation = simulate(improved, request.model);
    if (!fits(simulation, request.limits) || !best.improves(simulation.time)) continue;
    best.time = simulation.time;
    best.schedule = std::move(improved);
  }

  schedule::validate(*best.schedule);
  schedule::validate(schedule::lower(*best.schedule));
  Simulation simulation = simulate(*best.schedule, request.model);
  return {std::move(*best.schedule), std::move(simulation), best_fixed, best_fixed ? fixed_time : 0};
}

}  // namespace penstock::plan
