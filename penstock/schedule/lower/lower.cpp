#include "penstock/lower.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/schedule/check/work_set.h"
#include "penstock/validate.h"

namespace penstock::schedule {

namespace {

constexpr int kStays = -1;

// For every stage, the rank that its result is sent to, or kStays if the next stage is on the same rank or
// does not exist.
struct Peers {
  explicit Peers(const StageMap& map)
      : forward(static_cast<std::size_t>(map.stages()), kStays),
        backward(static_cast<std::size_t>(map.stages()), kStays) {
    for (int stage = 0; stage < map.stages(); ++stage) {
      const auto s = static_cast<std::size_t>(stage);
      const int here = map.rank_of(stage);
      if (!map.is_last(stage) && map.rank_of(stage + 1) != here) forward[s] = map.rank_of(stage + 1);
      if (!map.is_first(stage) && map.rank_of(stage - 1) != here) backward[s] = map.rank_of(stage - 1);
    }
  }

  int of(const Action& action) const {
    const auto stage = static_cast<std::size_t>(action.stage());
    if (action.kind() == ActionKind::Forward) return forward[stage];
    return produces_input_gradient(action.kind()) ? backward[stage] : kStays;
  }

  std::vector<int> forward;
  std::vector<int> backward;
};

// Ranks that are due in one round, taken in ascending order. Ranks above the current one may be added
// meanwhile.
class Round {
 public:
  explicit Round(int ranks) : words_((static_cast<std::size_t>(ranks) + 63) / 64, 0) {}

  void add(int rank) {
    words_[static_cast<std::size_t>(rank) / 64] |= std::uint64_t{1} << (rank % 64);
    first_ = std::min(first_, static_cast<std::size_t>(rank) / 64);
  }

  // Removes and returns the lowest rank that is due.
  std::optional<int> take() {
    while (first_ < words_.size() && words_[first_] == 0) ++first_;
    if (first_ == words_.size()) return std::nullopt;
    const int bit = std::countr_zero(words_[first_]);
    words_[first_] &= words_[first_] - 1;
    return static_cast<int>(first_ * 64) + bit;
  }

 private:
  std::vector<std::uint64_t> words_;
  std::size_t first_ = 0;  // words below this one are empty
};

// Adds sends and receives to the rows by executing all of them in rounds: in each round every rank, in
// ascending order, executes its next slot if its inputs are available. A receive is written together with its
// send, so the order of transfers in the rows never deadlocks, even if each transfer blocks both sides. A
// rank whose slot lacks an input is skipped until that input is computed: it runs in the same round if a
// lower rank computes it, otherwise in the next.
class TransferInserter {
 public:
  explicit TransferInserter(const Schedule& schedule)
      : source_(schedule),
        map_(schedule.stages()),
        result_(map_),
        peers_(map_),
        forwards_(map_),
        gradients_(map_),
        next_(static_cast<std::size_t>(map_.ranks()), 0),
        waits_for_(static_cast<std::size_t>(map_.ranks())),
        now_(map_.ranks()),
        later_(map_.ranks()) {}

  Schedule run() {
    reserve();
    std::size_t unfinished = 0;
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      if (source_.row(rank).empty()) continue;
      ++unfinished;
      later_.add(rank);
    }
    for (bool progress = true; progress && unfinished > 0;) {
      std::swap(now_, later_);
      progress = false;
      while (const auto rank = now_.take()) {
        progress = true;
        std::size_t& slot = next_[static_cast<std::size_t>(*rank)];
        if (!take(*rank, source_.row(*rank)[slot])) continue;
        if (++slot < source_.row(*rank).size()) {
          later_.add(*rank);
        } else {
          --unfinished;
        }
      }
    }
    if (unfinished > 0) throw ScheduleError(check(source_));
    return std::move(result_);
  }

 private:
  struct Need {
    bool is_forward;
    std::int32_t stage;
    std::int32_t microbatch;
    friend bool operator==(const Need&, const Need&) = default;
  };

  void reserve() {
    std::vector<std::size_t> sizes(static_cast<std::size_t>(map_.ranks()), 0);
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      sizes[static_cast<std::size_t>(rank)] += source_.row(rank).size();
      for (const Slot slot : source_.row(rank)) {
        for (const Action& action : slot) {
          const int peer = peers_.of(action);
          if (peer == kStays) continue;
          ++sizes[static_cast<std::size_t>(rank)];
          ++sizes[static_cast<std::size_t>(peer)];
        }
      }
    }
    for (int rank = 0; rank < map_.ranks(); ++rank)
      result_.row(rank).reserve(sizes[static_cast<std::size_t>(rank)]);
  }

  // What an action still waits for: the work of an adjacent stage on the same microbatch.
  std::optional<Need> unmet_need(const Action& action) const {
    const std::int32_t stage = action.stage();
    if (action.kind() == ActionKind::Forward && !map_.is_first(action.stage())) {
      const std::int32_t microbatch = *action.microbatch();
      if (!forwards_.contains(stage - 1, microbatch)) return Need{true, stage - 1, microbatch};
    } else if (produces_input_gradient(action.kind()) && !map_.is_last(action.stage())) {
      const std::int32_t microbatch = *action.microbatch();
      if (!gradients_.contains(stage + 1, microbatch)) return Need{false, stage + 1, microbatch};
    }
    return std::nullopt;
  }

  bool take(int rank, Slot slot) {
    for (const Action& action : slot) {
      if (const auto need = unmet_need(action)) {
        waits_for_[static_cast<std::size_t>(rank)] = need;
        return false;
      }
    }
    if (slot.empty()) return true;
    result_.row(rank).push_slot(slot);
    for (const Action& action : slot) {
      if (action.kind() == ActionKind::Forward || produces_input_gradient(action.kind()))
        complete(rank, action);
    }
    return true;
  }

  // Records a forward or an input gradient, transfers it if its consumer is on another rank, and wakes the
  // rank that waits for it.
  void complete(int rank, const Action& action) {
    const bool is_forward = action.kind() == ActionKind::Forward;
    const std::int32_t stage = action.stage();
    const int microbatch = *action.microbatch();
    (is_forward ? forwards_ : gradients_).insert(stage, microbatch);
    const int peer = peers_.of(action);
    if (peer == kStays) return;  // a consumer on the same rank comes later in the same row
    const int receiver = is_forward ? stage + 1 : stage - 1;
    result_.row(rank).push(
        Action(is_forward ? ActionKind::SendForward : ActionKind::SendBackward, action.stage(), microbatch));
    result_.row(peer).push(
        Action(is_forward ? ActionKind::RecvForward : ActionKind::RecvBackward, receiver, microbatch));
    auto& waits_for = waits_for_[static_cast<std::size_t>(peer)];
    if (waits_for && *waits_for == Need{is_forward, stage, microbatch}) {
      waits_for.reset();
      (peer > rank ? now_ : later_).add(peer);
    }
  }

  const Schedule& source_;
  const StageMap& map_;
  Schedule result_;
  Peers peers_;
  WorkSet forwards_;
  WorkSet gradients_;
  std::vector<std::size_t> next_;
  std::vector<std::optional<Need>> waits_for_;
  Round now_;
  Round later_;
};

// Moves each receive towards the action that consumes it. A receive from a higher rank stops before the next
// send to that rank: when two ranks exchange data, the lower one always receives first and the higher one
// sends first, so they do not deadlock.
Row with_deferred_receives(const Row& row, int rank, const StageMap& map) {
  struct Pending {
    Action receive;
    int peer;
  };
  std::vector<Pending> pending;
  Row result;
  result.reserve(row.size());
  const auto release = [&](auto&& matches) {
    std::size_t kept = 0;
    for (const Pending& entry : pending) {
      if (matches(entry)) {
        result.push(entry.receive);
      } else {
        pending[kept++] = entry;
      }
    }
    pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(kept), pending.end());
  };
  for (const Slot slot : row) {
    for (const Action& action : slot) {
      const ActionKind kind = action.kind();
      const std::int32_t stage = action.stage();
      if (is_send(kind)) {
        const int peer = map.rank_of(kind == ActionKind::SendForward ? stage + 1 : stage - 1);
        if (peer > rank) release([&](const Pending& entry) { return entry.peer == peer; });
      } else if (kind == ActionKind::Forward || produces_input_gradient(kind)) {
        const ActionKind receive =
            kind == ActionKind::Forward ? ActionKind::RecvForward : ActionKind::RecvBackward;
        release([&](const Pending& entry) {
          return entry.receive.kind() == receive && entry.receive.stage() == action.stage() &&
                 entry.receive.microbatch() == action.microbatch();
        });
      }
    }
    if (slot.size() == 1 && is_receive(slot[0].kind())) {
      const std::int32_t stage = slot[0].stage();
      const bool is_forward = slot[0].kind() == ActionKind::RecvForward;
      pending.push_back({slot[0], map.rank_of(is_forward ? stage - 1 : stage + 1)});
    } else if (!slot.empty()) {
      result.push_slot(slot);
    }
  }
  for (const Pending& entry : pending) result.push(entry.receive);
  return result;
}

template <class MicrobatchesOf>
Row with_reduce_grad(const Row& row, MicrobatchesOf microbatches_of) {
  Row result;
  result.reserve(row.size() + 8);
  struct Remaining {
    int stage;
    int microbatches;
  };
  std::vector<Remaining> remaining;  // a rank has few stages; the most recently used one is first
  for (const Slot slot : row) {
    if (slot.empty()) continue;
    result.push_slot(slot);
    for (const Action& action : slot) {
      if (!produces_weight_gradient(action.kind())) continue;
      auto found = std::find_if(remaining.begin(), remaining.end(),
                                [&](const Remaining& entry) { return entry.stage == action.stage(); });
      if (found == remaining.end())
        found = remaining.insert(remaining.end(), {action.stage(), microbatches_of(action.stage())});
      if (found != remaining.begin()) {
        std::iter_swap(found, remaining.begin());
        found = remaining.begin();
      }
      if (--found->microbatches == 0) {
        result.push(Action(ActionKind::ReduceGrad, action.stage()));
      }
    }
  }
  return result;
}

}  // namespace

Row add_reduce_grad(const Row& row, int microbatches) {
  return with_reduce_grad(row, [&](int) { return microbatches; });
}

Row add_reduce_grad(const Row& row, const StageMap& stages) {
  return with_reduce_grad(row, [&](int stage) { return stages.chain_of(stage).microbatches; });
}

Row merge_backward(const Row& row) {
  Row result;
  result.reserve(row.size());
  Slot held = {};  // an I whose W may follow
  for (const Slot slot : row) {
    if (slot.empty()) continue;
    if (!held.empty()) {
      const Action& input = held[0];
      if (slot.size() == 1 && slot[0].kind() == ActionKind::BackwardWeight &&
          slot[0].stage() == input.stage() && slot[0].microbatch() == input.microbatch()) {
        result.push(input.has_microbatch() ? Action(ActionKind::Backward, input.stage(), *input.microbatch())
                                           : Action(ActionKind::Backward, input.stage()));
        held = {};
        continue;
      }
      result.push_slot(held);
      held = {};
    }
    if (slot.size() == 1 && slot[0].kind() == ActionKind::BackwardInput) {
      held = slot;
    } else {
      result.push_slot(slot);
    }
  }
  if (!held.empty()) result.push_slot(held);
  return result;
}

Schedule add_send_receive(const Schedule& schedule, bool defer_receives) {
  check_numbers(schedule);
  check_density(schedule);
  Schedule result = TransferInserter(schedule).run();
  if (defer_receives) {
    for (int rank = 0; rank < result.ranks(); ++rank) {
      result.row(rank) = with_deferred_receives(result.row(rank), rank, result.stages());
    }
  }
  return result;
}

namespace {

struct Place {
  int rank;
  std::size_t slot;
  Action action;
};

std::optional<Place> first_lowered_action(const Schedule& schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::size_t position = 0;
    for (const Slot slot : schedule.row(rank)) {
      for (const Action& action : slot)
        if (!is_compute(action.kind())) return Place{rank, position, action};
      ++position;
    }
  }
  return std::nullopt;
}

}  // namespace

bool is_compute_only(const Schedule& schedule) { return !first_lowered_action(schedule); }

Schedule lower(const Schedule& schedule, const LowerOptions& options) {
  if (const auto place = first_lowered_action(schedule)) {
    throw ValueError(
        describe("schedule to lower",
                 fmt::format("{} on rank {}, slot {}", to_text(place->action), place->rank, place->slot),
                 "compute actions alone (F, B, I, W)",
                 "remove sends, receives, UNSHARD, RESHARD and REDUCE_GRAD, which lowering "
                 "adds, or use the schedule without lowering it"));
  }
  Schedule prepared(schedule.stages());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    Row& row = prepared.row(rank);
    row = options.unshard ? add_unshard_reshard(schedule.row(rank), options.max_active_stages)
                          : schedule.row(rank);
    if (options.reduce_grad) row = add_reduce_grad(row, schedule.stages());
  }
  return add_send_receive(prepared, options.defer_receives);
}

}  // namespace penstock::schedule
