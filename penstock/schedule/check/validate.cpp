#include "penstock/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "penstock/schedule/check/validate_parts.h"
#include "penstock/schedule/check/work_set.h"

namespace penstock::schedule {

namespace {

constexpr std::size_t kAlwaysAffordable = std::size_t{1} << 24;

std::size_t work_size(const StageMap& map) {
  return static_cast<std::size_t>(map.stages()) * static_cast<std::size_t>(map.microbatches());
}

std::optional<Violation> density_violation(const Schedule& schedule) {
  const std::size_t work = work_size(schedule.stages());
  if (work <= kAlwaysAffordable) return std::nullopt;
  const std::size_t actions = schedule.actions();
  if (work / 8 <= actions) return std::nullopt;
  return Violation{
      ViolationKind::Missing,
      fmt::format("{} stages and {} microbatches occur, but only {} actions; every stage must run every "
                  "microbatch of its chain",
                  schedule.stages().stages(), schedule.stages().microbatches(), actions),
      {}};
}

// Why the numbers of an action are invalid in this schedule; empty if they are valid.
std::string malformation(const StageMap& map, const Action& action) {
  if (!map.has_stage(action.stage())) {
    return fmt::format("its stage is outside 0 to {}", map.stages() - 1);
  }
  if (is_stage_wide(action.kind())) {
    return action.has_microbatch() ? "it applies to a whole stage and takes no microbatch" : "";
  }
  if (!action.has_microbatch()) return "it needs a microbatch";
  if (!map.runs(action.stage(), *action.microbatch())) {
    const Chain& chain = map.chain_of(action.stage());
    return fmt::format("microbatches of this stage are {} to {}", chain.first_microbatch,
                       chain.first_microbatch + chain.microbatches - 1);
  }
  return {};
}

// Visits every row once and records which work was done.
class RowChecks {
 public:
  RowChecks(const Schedule& schedule, const ValidateOptions& options, Report& report)
      : schedule_(schedule),
        map_(schedule.stages()),
        options_(options),
        report_(report),
        lowered_(schedule.has_transfers()),
        stages_(static_cast<std::size_t>(map_.stages())) {
    const std::size_t sets =
        lowered_ ? 8 : 4;  // the last four kinds that have a microbatch are the transfers
    for (std::size_t i = 0; i < sets; ++i) done_.emplace_back(map_);
    for (const Row& row : schedule.rows()) {
      for (const Slot slot : row) {
        if (slot.size() != 1) continue;
        has_unshard_ = has_unshard_ || slot[0].kind() == ActionKind::Unshard;
        has_reduce_ = has_reduce_ || slot[0].kind() == ActionKind::ReduceGrad;
      }
    }
  }

  void run() {
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      const Row& row = schedule_.row(rank);
      for (std::size_t i = 0; i < row.size() && !full(); ++i) slot({rank, i}, row[i]);
    }
    for (int stage = 0; stage < map_.stages() && !full(); ++stage) completeness(stage);
  }

 private:
  struct StageAccount {
    std::array<std::int32_t, 8> counts = {};  // distinct microbatches by kind
    bool gathered = false;
    bool reduced = false;
  };

  bool full() const { return report_.violations.size() >= options_.max_violations; }

  void violate(ViolationKind kind, const Place& place, const Action& action, const std::string& why) {
    if (full()) return;
    report_.violations.push_back(
        {kind,
         fmt::format("{} at rank {}, slot {}: {}", to_text(action), place.rank, place.slot, why),
         {place}});
  }

  bool done(ActionKind kind, std::int32_t stage, const Action& action) const {
    return done_[static_cast<std::size_t>(kind)].contains(stage, *action.microbatch());
  }
  bool gradient_done(std::int32_t stage, const Action& action) const {
    return done(ActionKind::Backward, stage, action) || done(ActionKind::BackwardInput, stage, action);
  }

  void slot(const Place& place, Slot members) {
    if (members.size() == 1) [[likely]] {
      if (admissible(place, members[0])) {
        order(place, members[0]);
        record(place, members[0]);
      }
      return;
    }
    // Members of an overlap run at the same time: none may depend on another's result.
    for (const Action& action : members) {
      if (!is_compute(action.kind())) {
        violate(ViolationKind::Malformed, place, action, "only F, B, I and W can be members of an overlap");
        return;
      }
      if (!admissible(place, action)) return;
      if (!options_.as_pytorch) order(place, action);
    }
    for (const Action& action : members) {
      if (options_.as_pytorch) order(place, action);
      record(place, action);
    }
  }

  // Checks numbers and rank. An action that fails here is not checked further.
  bool admissible(const Place& place, const Action& action) {
    if (const std::string why = malformation(map_, action); !why.empty()) {
      violate(ViolationKind::Malformed, place, action, why);
      return false;
    }
    if (map_.rank_of(action.stage()) != place.rank) {
      violate(ViolationKind::WrongRank, place, action,
              fmt::format("stage {} belongs to rank {}; move the action there or change the placement",
                          action.stage(), map_.rank_of(action.stage())));
      return false;
    }
    return true;
  }

  void order(const Place& place, const Action& action) {
    const std::int32_t stage = action.stage();
    const auto needs = [&](bool met, const char* what) {
      if (!met)
        violate(ViolationKind::Order, place, action, fmt::format("needs {} before it on this rank", what));
    };
    switch (action.kind()) {
      case ActionKind::Forward:
        if (!options_.as_pytorch) needs(activation_here(action), "the activation of the previous stage");
        gathered(place, action);
        return;
      case ActionKind::Backward:
      case ActionKind::BackwardInput:
        needs(done(ActionKind::Forward, stage, action), "the forward of the same microbatch");
        if (!options_.as_pytorch) needs(gradient_here(action), "the gradient of the next stage");
        gathered(place, action);
        return;
      case ActionKind::BackwardWeight:
        needs(done(ActionKind::BackwardInput, stage, action), "the I of the same microbatch");
        gathered(place, action);
        return;
      case ActionKind::SendForward:
        needs(done(ActionKind::Forward, stage, action), "the forward of the same microbatch");
        crosses(place, action, !map_.is_last(action.stage()), stage + 1);
        return;
      case ActionKind::SendBackward:
        needs(gradient_done(stage, action), "the B or I of the same microbatch");
        crosses(place, action, !map_.is_first(action.stage()), stage - 1);
        return;
      case ActionKind::RecvForward:
        crosses(place, action, !map_.is_first(action.stage()), stage - 1);
        return;
      case ActionKind::RecvBackward:
        crosses(place, action, !map_.is_last(action.stage()), stage + 1);
        return;
      case ActionKind::Unshard:
      case ActionKind::Reshard:
      case ActionKind::ReduceGrad:
        stage_wide(place, action);
        return;
    }
  }

  // In a compute-only schedule, the deadlock check covers inputs from other ranks.
  bool activation_here(const Action& action) const {
    if (map_.is_first(action.stage())) return true;
    const std::int32_t previous = action.stage() - 1;
    if (map_.rank_of(previous) == map_.rank_of(action.stage()))
      return done(ActionKind::Forward, previous, action);
    return !lowered_ || done(ActionKind::RecvForward, action.stage(), action);
  }
  bool gradient_here(const Action& action) const {
    if (map_.is_last(action.stage())) return true;
    const std::int32_t next = action.stage() + 1;
    if (map_.rank_of(next) == map_.rank_of(action.stage())) return gradient_done(next, action);
    return !lowered_ || done(ActionKind::RecvBackward, action.stage(), action);
  }

  void gathered(const Place& place, const Action& action) {
    if (!has_unshard_ || options_.as_pytorch || account(action).gathered) return;
    violate(ViolationKind::Sharding, place, action,
            "the stage's parameters are not gathered; put UNSHARD before it");
  }

  void crosses(const Place& place, const Action& action, bool has_neighbour, std::int32_t neighbour) {
    if (options_.as_pytorch) return;
    if (!has_neighbour) {
      violate(ViolationKind::TransferOrder, place, action,
              "there is no stage on the other side; remove the transfer");
    } else if (map_.rank_of(neighbour) == place.rank) {
      violate(ViolationKind::TransferOrder, place, action,
              fmt::format("stage {} is on the same rank, so nothing is transferred; remove it", neighbour));
    }
  }

  void stage_wide(const Place& place, const Action& action) {
    if (options_.as_pytorch) return;
    StageAccount& mine = account(action);
    if (action.kind() == ActionKind::Unshard) {
      if (mine.gathered) violate(ViolationKind::Sharding, place, action, "the stage is already gathered");
      mine.gathered = true;
    } else if (action.kind() == ActionKind::Reshard) {
      if (!mine.gathered) violate(ViolationKind::Sharding, place, action, "the stage is not gathered");
      mine.gathered = false;
    } else {
      const std::int32_t weights = mine.counts[static_cast<std::size_t>(ActionKind::Backward)] +
                                   mine.counts[static_cast<std::size_t>(ActionKind::BackwardWeight)];
      const std::int32_t all = map_.chain_of(action.stage()).microbatches;
      if (mine.reduced) {
        violate(ViolationKind::Duplicate, place, action, "the stage's gradients were already reduced");
      } else if (weights < all) {
        violate(ViolationKind::Sharding, place, action,
                fmt::format("{} of {} weight gradients of the stage have run; move it after the last one",
                            weights, all));
      }
      mine.reduced = true;
    }
  }

  StageAccount& account(const Action& action) { return stages_[static_cast<std::size_t>(action.stage())]; }

  void record(const Place& place, const Action& action) {
    if (is_stage_wide(action.kind())) return;
    const std::int32_t stage = action.stage();
    bool twice = !done_[static_cast<std::size_t>(action.kind())].insert(stage, *action.microbatch());
    if (!twice) ++account(action).counts[static_cast<std::size_t>(action.kind())];
    if (options_.as_pytorch) return;
    if (action.kind() == ActionKind::Backward)
      twice = twice || done(ActionKind::BackwardInput, stage, action);
    if (action.kind() == ActionKind::BackwardInput)
      twice = twice || done(ActionKind::Backward, stage, action);
    if (twice)
      violate(ViolationKind::Duplicate, place, action,
              "the same work was already done; remove one of the two actions");
  }

  void completeness(std::int32_t stage) {
    Chain chain = map_.chain_of(stage);
    // PyTorch 2.14 counts distinct microbatches and ignores their numbers.
    if (options_.as_pytorch && options_.expected) chain.microbatches = options_.expected->microbatches;
    const auto count = [&](ActionKind kind) {
      return stages_[static_cast<std::size_t>(stage)].counts[static_cast<std::size_t>(kind)];
    };
    expect_all(stage, chain, "F", count(ActionKind::Forward),
               [&](const Action& a) { return done(ActionKind::Forward, stage, a); });
    expect_all(stage, chain, "B or I", count(ActionKind::Backward) + count(ActionKind::BackwardInput),
               [&](const Action& a) { return gradient_done(stage, a); });
    expect_all(stage, chain, "B or W", count(ActionKind::Backward) + count(ActionKind::BackwardWeight),
               [&](const Action& a) {
                 return done(ActionKind::Backward, stage, a) || done(ActionKind::BackwardWeight, stage, a);
               });
    if (options_.as_pytorch) return;
    if (lowered_) {
      const bool next_elsewhere = !map_.is_last(stage) && map_.rank_of(stage + 1) != map_.rank_of(stage);
      const bool previous_elsewhere = !map_.is_first(stage) && map_.rank_of(stage - 1) != map_.rank_of(stage);
      const auto expect_transfer = [&](bool crosses, ActionKind kind) {
        if (!crosses) return;
        expect_all(stage, chain, to_text(kind), count(kind),
                   [&](const Action& a) { return done(kind, stage, a); });
      };
      expect_transfer(next_elsewhere, ActionKind::SendForward);
      expect_transfer(next_elsewhere, ActionKind::RecvBackward);
      expect_transfer(previous_elsewhere, ActionKind::SendBackward);
      expect_transfer(previous_elsewhere, ActionKind::RecvForward);
    }
    if (has_reduce_ && chain.microbatches > 0 && !stages_[static_cast<std::size_t>(stage)].reduced &&
        !full()) {
      report_.violations.push_back({ViolationKind::Missing,
                                    fmt::format("{}REDUCE_GRAD is missing; other stages have one", stage),
                                    {}});
    }
  }

  template <class Done>
  void expect_all(std::int32_t stage, const Chain& chain, std::string_view what, std::int32_t count,
                  Done is_done) {
    if (count == chain.microbatches || full()) return;
    std::string missing;
    for (int i = 0; i < chain.microbatches && missing.size() < 40; ++i) {
      const int microbatch = chain.first_microbatch + i;
      if (microbatch >= map_.microbatches()) break;
      if (is_done(forward(stage, microbatch))) continue;
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", microbatch);
    }
    report_.violations.push_back(
        {ViolationKind::Missing,
         missing.empty()
             ? fmt::format("stage {} runs {} for {} microbatches, expected {}", stage, what, count,
                           chain.microbatches)
             : fmt::format("stage {} on rank {} does not run {} for microbatch {} ({} of {} are present)",
                           stage, map_.rank_of(stage), what, missing, count, chain.microbatches),
         {}});
  }

  const Schedule& schedule_;
  const StageMap& map_;
  const ValidateOptions& options_;
  Report& report_;
  bool lowered_;
  bool has_unshard_ = false;
  bool has_reduce_ = false;
  std::vector<StageAccount> stages_;
  std::vector<WorkSet> done_;
};

void check_extent(const Schedule& schedule, const ValidateOptions& options, Report& report) {
  const ValidateOptions::Extent& expected = *options.expected;
  const auto compare = [&](const char* what, int actual, int wanted) {
    if (actual == wanted) return;
    report.violations.push_back({ViolationKind::Extent,
                                 fmt::format("the schedule has {} {}, expected {}", actual, what, wanted),
                                 {}});
  };
  compare("ranks", schedule.ranks(), expected.ranks);
  compare("stages", schedule.stages().stages(), expected.stages);
  if (!options.as_pytorch) compare("microbatches", schedule.microbatches(), expected.microbatches);
}

}  // namespace

void check_density(const Schedule& schedule) {
  if (auto violation = density_violation(schedule))
    throw ScheduleError(Report{{std::move(*violation)}, {}, {}});
}

void check_numbers(const Schedule& schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const Row& row = schedule.row(rank);
    for (std::size_t slot = 0; slot < row.size(); ++slot) {
      for (const Action& action : row[slot]) {
        const std::string why = malformation(schedule.stages(), action);
        if (why.empty()) [[likely]]
          continue;
        throw ScheduleError(
            Report{{{ViolationKind::Malformed,
                     fmt::format("{} at rank {}, slot {}: {}", to_text(action), rank, slot, why),
                     {{rank, slot}}}},
                   {},
                   {}});
      }
    }
  }
}

Report check(const Schedule& schedule, const ValidateOptions& options) {
  Report report;
  if (options.expected) {
    check_extent(schedule, options, report);
    if (!report.ok()) return report;
  }
  if (auto violation = density_violation(schedule)) {
    report.violations.push_back(std::move(*violation));
    return report;
  }
  RowChecks(schedule, options, report).run();
  if (!report.ok()) {
    // An invalid action or one on the wrong rank is often the cause of the violations that follow.
    std::stable_sort(report.violations.begin(), report.violations.end(),
                     [](const Violation& a, const Violation& b) { return a.kind < b.kind; });
    std::vector<Place> places;
    for (const Violation& violation : report.violations) {
      places.insert(places.end(), violation.places.begin(), violation.places.end());
    }
    report.grid = marked_grid(schedule, places, {});
    return report;
  }
  if (!options.as_pytorch) check_progress(schedule, options.sends, report);
  return report;
}

const Schedule& validate(const Schedule& schedule, const ValidateOptions& options) {
  Report report = check(schedule, options);
  if (!report.ok()) throw ScheduleError(std::move(report));
  return schedule;
}

Schedule validate(Schedule&& schedule, const ValidateOptions& options) {
  Report report = check(schedule, options);
  if (!report.ok()) throw ScheduleError(std::move(report));
  return std::move(schedule);
}

}  // namespace penstock::schedule
