#include "penstock/schedule/check/dry_run.h"

#include <algorithm>
#include <array>
#include <vector>

#include "penstock/schedule/check/work_set.h"
#include "penstock/validate.h"

namespace penstock::schedule {

namespace {

class DryRunner {
 public:
  explicit DryRunner(const Schedule& schedule)
      : source_(schedule),
        map_(schedule.stages()),
        lowered_(schedule.has_transfers()),
        result_(map_),
        next_(static_cast<std::size_t>(map_.ranks()), 0),
        done_{WorkSet(map_), WorkSet(map_), WorkSet(map_), WorkSet(map_), WorkSet(map_), WorkSet(map_)} {}

  Schedule run() {
    std::vector<int> running;
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      if (!source_.row(rank).empty()) running.push_back(rank);
    }
    std::vector<int> stalled;
    while (!running.empty()) {
      stalled.clear();
      for (const int rank : running) {
        if (!act(rank)) stalled.push_back(rank);
      }
      const bool progress = stalled.size() < running.size();
      for (const int rank : stalled) {
        if (!act(rank)) result_.row(rank).push_idle();
      }
      std::erase_if(running, [&](int rank) {
        return next_[static_cast<std::size_t>(rank)] == source_.row(rank).size();
      });
      if (!progress) throw ScheduleError(check(source_, {.sends = SendModel::Posted}));
    }
    return std::move(result_);
  }

 private:
  enum Event { kForward, kGradient, kSentForward, kReceivedForward, kSentGradient, kReceivedGradient };

  bool done(Event event, std::int32_t stage, const Action& action) const {
    return done_[event].contains(stage, *action.microbatch());
  }

  // Whether the input of a compute action is available: received, or computed by the adjacent stage on the
  // same rank; in a compute-only schedule, computed on any rank.
  bool input_there(const Action& action, Event received, Event made, std::int32_t neighbour) const {
    if (!lowered_ || map_.rank_of(neighbour) == map_.rank_of(action.stage()))
      return done(made, neighbour, action);
    return done(received, action.stage(), action);
  }

  bool ready(const Action& action) const {
    const std::int32_t stage = action.stage();
    switch (action.kind()) {
      case ActionKind::Forward:
        return map_.is_first(action.stage()) || input_there(action, kReceivedForward, kForward, stage - 1);
      case ActionKind::Backward:
      case ActionKind::BackwardInput:
        return map_.is_last(action.stage()) || input_there(action, kReceivedGradient, kGradient, stage + 1);
      case ActionKind::SendForward:
        return done(kForward, stage, action);
      case ActionKind::SendBackward:
        return done(kGradient, stage, action);
      case ActionKind::RecvForward:
        return !map_.is_first(action.stage()) && done(kSentForward, stage - 1, action);
      case ActionKind::RecvBackward:
        return !map_.is_last(action.stage()) && done(kSentGradient, stage + 1, action);
      case ActionKind::BackwardWeight:
      case ActionKind::Unshard:
      case ActionKind::Reshard:
      case ActionKind::ReduceGrad:
        return true;
    }
    return true;
  }

  void record(const Action& action) {
    const auto mark = [&](Event event) { done_[event].insert(action.stage(), *action.microbatch()); };
    switch (action.kind()) {
      case ActionKind::Forward:
        return mark(kForward);
      case ActionKind::Backward:
      case ActionKind::BackwardInput:
        return mark(kGradient);
      case ActionKind::SendForward:
        return mark(kSentForward);
      case ActionKind::SendBackward:
        return mark(kSentGradient);
      case ActionKind::RecvForward:
        return mark(kReceivedForward);
      case ActionKind::RecvBackward:
        return mark(kReceivedGradient);
      case ActionKind::BackwardWeight:
      case ActionKind::Unshard:
      case ActionKind::Reshard:
      case ActionKind::ReduceGrad:
        return;
    }
  }

  bool act(int rank) {
    std::size_t& position = next_[static_cast<std::size_t>(rank)];
    const Slot slot = source_.row(rank)[position];
    if (!std::ranges::all_of(slot, [&](const Action& action) { return ready(action); })) return false;
    for (const Action& action : slot) record(action);
    result_.row(rank).push_slot(slot);
    ++position;
    return true;
  }

  const Schedule& source_;
  const StageMap& map_;
  bool lowered_;
  Schedule result_;
  std::vector<std::size_t> next_;
  std::array<WorkSet, 6> done_;
};

}  // namespace

Schedule dry_run(const Schedule& schedule) {
  check_numbers(schedule);
  check_density(schedule);
  const Schedule packed = without_idle(schedule);
  return DryRunner(packed).run();
}

}  // namespace penstock::schedule
