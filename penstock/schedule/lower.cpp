#include "penstock/schedule/lower.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "penstock/base/errors.h"
#include "penstock/schedule/validate.h"
#include "penstock/schedule/work_set.h"

namespace penstock::schedule {

namespace {

// The stage on the other side when this compute action's result leaves its rank; none when it stays or ends here.
std::optional<StageId> receiver_of(const StageMap& map, const Action& action) {
  const StageId stage = action.stage();
  if (action.kind() == ActionKind::Forward && !map.is_last(stage)) {
    const StageId next{stage.value() + 1};
    if (map.rank_of(next) != map.rank_of(stage)) return next;
  } else if (gives_input_gradient(action.kind()) && !map.is_first(stage)) {
    const StageId previous{stage.value() - 1};
    if (map.rank_of(previous) != map.rank_of(stage)) return previous;
  }
  return std::nullopt;
}

// Gives the rows their sends and receives by walking all of them at once: in each round every rank takes its next slot if
// the inputs are there. A receive is written when its send is, so in every row transfers stand in an order in which
// they can all happen, even if each of them blocks both sides.
class TransferInserter {
 public:
  explicit TransferInserter(const Schedule& schedule)
      : source_(schedule), map_(schedule.stages()), result_(map_), forwards_(map_), gradients_(map_) {}

  Schedule run() {
    reserve();
    std::vector<std::size_t> next(static_cast<std::size_t>(map_.ranks()), 0);
    std::vector<int> running;
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      if (!source_.row(rank).empty()) running.push_back(rank);
    }
    while (!running.empty()) {
      bool progress = false;
      std::size_t kept = 0;
      for (const int rank : running) {
        std::size_t& slot = next[static_cast<std::size_t>(rank)];
        if (take(rank, source_.row(rank)[slot])) {
          progress = true;
          ++slot;
        }
        if (slot < source_.row(rank).size()) running[kept++] = rank;
      }
      running.resize(kept);
      if (!progress) throw ScheduleError(check(source_));
    }
    return std::move(result_);
  }

 private:
  void reserve() {
    std::vector<std::size_t> sizes(static_cast<std::size_t>(map_.ranks()), 0);
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      sizes[static_cast<std::size_t>(rank)] += source_.row(rank).size();
      for (const Slot slot : source_.row(rank)) {
        for (const Action& action : slot) {
          if (const auto receiver = receiver_of(map_, action)) {
            ++sizes[static_cast<std::size_t>(rank)];
            ++sizes[static_cast<std::size_t>(map_.rank_of(*receiver))];
          }
        }
      }
    }
    for (int rank = 0; rank < map_.ranks(); ++rank) result_.row(rank).reserve(sizes[static_cast<std::size_t>(rank)]);
  }

  bool ready(const Action& action) const {
    const std::int32_t stage = action.stage().value();
    if (action.kind() == ActionKind::Forward) {
      return map_.is_first(action.stage()) || forwards_.contains(stage - 1, action.microbatch()->value());
    }
    if (gives_input_gradient(action.kind())) {
      return map_.is_last(action.stage()) || gradients_.contains(stage + 1, action.microbatch()->value());
    }
    return true;
  }

  bool take(int rank, Slot slot) {
    if (!std::ranges::all_of(slot, [&](const Action& action) { return ready(action); })) return false;
    if (slot.empty()) return true;
    result_.row(rank).push_slot(slot);
    for (const Action& action : slot) {
      if (!is_compute(action.kind()) || action.kind() == ActionKind::BackwardWeight) continue;
      const bool is_forward = action.kind() == ActionKind::Forward;
      (is_forward ? forwards_ : gradients_).insert(action.stage().value(), action.microbatch()->value());
      if (const auto receiver = receiver_of(map_, action)) {
        const MicrobatchId microbatch = *action.microbatch();
        result_.row(rank).push(
            Action(is_forward ? ActionKind::SendForward : ActionKind::SendBackward, action.stage(), microbatch));
        result_.row(map_.rank_of(*receiver))
            .push(Action(is_forward ? ActionKind::RecvForward : ActionKind::RecvBackward, *receiver, microbatch));
      }
    }
    return true;
  }

  const Schedule& source_;
  const StageMap& map_;
  Schedule result_;
  WorkSet forwards_;
  WorkSet gradients_;
};

// Moves each receive towards the action that consumes it. A receive from a higher rank stops in front of the next send to
// that rank: of two ranks that exchange data the lower one then always receives first and the higher one sends first, so
// the two sides of an exchange meet in opposite roles.
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
      const std::int32_t stage = action.stage().value();
      if (is_send(kind)) {
        const int peer = map.rank_of(StageId{kind == ActionKind::SendForward ? stage + 1 : stage - 1});
        if (peer > rank) release([&](const Pending& entry) { return entry.peer == peer; });
      } else if (kind == ActionKind::Forward || gives_input_gradient(kind)) {
        const ActionKind receive = kind == ActionKind::Forward ? ActionKind::RecvForward : ActionKind::RecvBackward;
        release([&](const Pending& entry) {
          return entry.receive.kind() == receive && entry.receive.stage() == action.stage() &&
                 entry.receive.microbatch() == action.microbatch();
        });
      }
    }
    if (slot.size() == 1 && is_receive(slot[0].kind())) {
      const std::int32_t stage = slot[0].stage().value();
      const bool is_forward = slot[0].kind() == ActionKind::RecvForward;
      pending.push_back({slot[0], map.rank_of(StageId{is_forward ? stage - 1 : stage + 1})});
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
  std::unordered_map<std::int32_t, int> counts;
  for (const Slot slot : row) {
    if (slot.empty()) continue;
    result.push_slot(slot);
    for (const Action& action : slot) {
      if (!gives_weight_gradient(action.kind())) continue;
      if (++counts[action.stage().value()] == microbatches_of(action.stage())) {
        result.push(Action(ActionKind::ReduceGrad, action.stage()));
      }
    }
  }
  return result;
}

}  // namespace

Row add_reduce_grad(const Row& row, int microbatches) {
  return with_reduce_grad(row, [&](StageId) { return microbatches; });
}

Row add_reduce_grad(const Row& row, const StageMap& stages) {
  return with_reduce_grad(row, [&](StageId stage) { return stages.chain_of(stage).microbatches; });
}

Row merge_backward(const Row& row) {
  Row result;
  result.reserve(row.size());
  Slot held = {};  // an I whose W may follow
  for (const Slot slot : row) {
    if (slot.empty()) continue;
    if (!held.empty()) {
      const Action& input = held[0];
      if (slot.size() == 1 && slot[0].kind() == ActionKind::BackwardWeight && slot[0].stage() == input.stage() &&
          slot[0].microbatch() == input.microbatch()) {
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

Schedule lower(const Schedule& schedule, const LowerOptions& options) {
  if (schedule.has_transfers()) {
    throw ValueError(describe("schedule to lower", "one that has sends or receives", "a compute-only schedule"));
  }
  Schedule prepared(schedule.stages());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    Row& row = prepared.row(rank);
    row = options.unshard ? add_unshard_reshard(schedule.row(rank), options.max_active_stages) : schedule.row(rank);
    if (options.reduce_grad) row = add_reduce_grad(row, schedule.stages());
  }
  return add_send_receive(prepared, options.defer_receives);
}

}  // namespace penstock::schedule
