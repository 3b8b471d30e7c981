// Checks whether the rows of a schedule can all run to completion in parallel; if not, finds the shortest
// cycle of ranks that wait for each other.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/schedule/check/validate_parts.h"
#include "penstock/schedule/check/work_set.h"

namespace penstock::schedule {

namespace {

constexpr std::int32_t kNoChannel = -1;

// The stage and kind on the other side of a transfer.
Action counterpart(const Action& transfer) {
  const std::int32_t stage = transfer.stage();
  const int microbatch = *transfer.microbatch();
  switch (transfer.kind()) {
    case ActionKind::SendForward:
      return Action(ActionKind::RecvForward, stage + 1, microbatch);
    case ActionKind::RecvForward:
      return Action(ActionKind::SendForward, stage - 1, microbatch);
    case ActionKind::SendBackward:
      return Action(ActionKind::RecvBackward, stage - 1, microbatch);
    case ActionKind::RecvBackward:
      return Action(ActionKind::SendBackward, stage + 1, microbatch);
    default:
      break;
  }
  PENSTOCK_INVARIANT(false, "only transfers have a counterpart");
}

class ProgressCheck {
 public:
  ProgressCheck(const Schedule& schedule, SendModel sends, Report& report)
      : schedule_(schedule),
        map_(schedule.stages()),
        lowered_(schedule.has_transfers()),
        posted_sends_(sends == SendModel::Posted),
        report_(report),
        position_(static_cast<std::size_t>(map_.ranks()), 0),
        queued_(static_cast<std::size_t>(map_.ranks()), false),
        waits_for_(static_cast<std::size_t>(map_.ranks())),
        forwards_(map_),
        gradients_(map_) {
    if (lowered_) name_channels();
  }

  void run() {
    for (int rank = 0; rank < map_.ranks(); ++rank) enqueue(rank);
    while (!runnable_.empty() && report_.ok()) {
      const int rank = runnable_.front();
      runnable_.pop_front();
      queued_[index(rank)] = false;
      while (position_[index(rank)] < schedule_.row(rank).size() && step(rank)) ++position_[index(rank)];
    }
    if (!report_.ok()) return;
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      if (position_[index(rank)] < schedule_.row(rank).size()) stuck_.push_back(rank);
    }
    if (!stuck_.empty()) report_deadlock();
  }

 private:
  // One communicator: the next transfer at both ends.
  struct ChannelState {
    std::optional<Place> sender_at;    // a waiting sender (blocking sends)
    std::optional<Place> receiver_at;  // a waiting receiver
    std::deque<Place> posted;          // sends that were posted and not yet received (posted sends)
  };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  void name_channels() {
    std::map<std::tuple<int, int, bool>, std::int32_t> known;
    const auto name = [&](int from, int to, bool is_forward) -> std::int32_t {
      if (map_.rank_of(from) == map_.rank_of(to)) return kNoChannel;
      const auto [found, fresh] = known.try_emplace({map_.rank_of(from), map_.rank_of(to), is_forward},
                                                    static_cast<std::int32_t>(channels_.size()));
      if (fresh) channels_.emplace_back();
      return found->second;
    };
    forward_channel_.assign(static_cast<std::size_t>(map_.stages()), kNoChannel);
    backward_channel_ = forward_channel_;
    for (int stage = 0; stage + 1 < map_.stages(); ++stage) {
      if (map_.is_last(stage)) continue;
      forward_channel_[static_cast<std::size_t>(stage)] = name(stage, stage + 1, true);
      backward_channel_[static_cast<std::size_t>(stage)] = name(stage + 1, stage, false);
    }
  }

  ChannelState& channel_of(const Action& transfer) {
    const auto stage = static_cast<std::size_t>(transfer.stage());
    switch (transfer.kind()) {
      case ActionKind::SendForward:
        return channels_[static_cast<std::size_t>(forward_channel_[stage])];
      case ActionKind::RecvForward:
        return channels_[static_cast<std::size_t>(forward_channel_[stage - 1])];
      case ActionKind::SendBackward:
        return channels_[static_cast<std::size_t>(backward_channel_[stage - 1])];
      case ActionKind::RecvBackward:
        return channels_[static_cast<std::size_t>(backward_channel_[stage])];
      default:
        break;
    }
    PENSTOCK_INVARIANT(false, "only transfers use a communicator");
  }

  void enqueue(int rank) {
    if (queued_[index(rank)]) return;
    queued_[index(rank)] = true;
    runnable_.push_back(rank);
  }

  const Action& action_at(const Place& place) const { return schedule_.row(place.rank)[place.slot][0]; }

  // Returns true if the slot at the rank's position was executed.
  bool step(int rank) {
    const Place here = {rank, position_[index(rank)]};
    const Slot slot = schedule_.row(rank)[here.slot];
    if (slot.empty()) return true;
    if (is_send(slot[0].kind())) return send(here, slot[0]);
    if (is_receive(slot[0].kind())) return receive(here, slot[0]);
    if (lowered_) return true;  // its inputs come earlier in its own row, or `check` would have reported it
    for (const Action& action : slot) {
      if (const auto need = unmet_need(action)) {
        waits_for_[index(rank)] = need;
        return false;
      }
    }
    waits_for_[index(rank)].reset();
    for (const Action& action : slot) complete(action);
    return true;
  }

  // What a compute action of a compute-only schedule still waits for.
  std::optional<Action> unmet_need(const Action& action) const {
    const std::int32_t stage = action.stage();
    if (action.kind() == ActionKind::Forward && !map_.is_first(action.stage())) {
      if (!forwards_.contains(stage - 1, *action.microbatch())) {
        return Action(ActionKind::Forward, stage - 1, *action.microbatch());
      }
    } else if (produces_input_gradient(action.kind()) && !map_.is_last(action.stage())) {
      if (!gradients_.contains(stage + 1, *action.microbatch())) {
        return Action(ActionKind::Backward, stage + 1, *action.microbatch());
      }
    }
    return std::nullopt;
  }

  void complete(const Action& action) {
    if (!is_compute(action.kind()) || action.kind() == ActionKind::BackwardWeight) return;
    const std::int32_t stage = action.stage();
    const bool is_forward = action.kind() == ActionKind::Forward;
    (is_forward ? forwards_ : gradients_).insert(stage, *action.microbatch());
    const bool at_border = is_forward ? map_.is_last(action.stage()) : map_.is_first(action.stage());
    if (at_border) return;
    const int neighbour = map_.rank_of(is_forward ? stage + 1 : stage - 1);
    const auto& waits_for = waits_for_[index(neighbour)];
    if (waits_for && waits_for->stage() == action.stage() && waits_for->microbatch() == action.microbatch()) {
      enqueue(neighbour);
    }
  }

  bool send(const Place& here, const Action& action) {
    ChannelState& channel = channel_of(action);
    if (posted_sends_) {
      if (channel.receiver_at && matches(here, *channel.receiver_at)) {
        pass(*channel.receiver_at);
        channel.receiver_at.reset();
      } else {
        channel.posted.push_back(here);
      }
      return true;
    }
    if (channel.receiver_at) {
      if (!matches(here, *channel.receiver_at)) return false;
      pass(*channel.receiver_at);
      channel.receiver_at.reset();
      return true;
    }
    channel.sender_at = here;
    return false;
  }

  bool receive(const Place& here, const Action& action) {
    ChannelState& channel = channel_of(action);
    if (!channel.posted.empty()) {
      if (!matches(channel.posted.front(), here)) return false;
      channel.posted.pop_front();
      return true;
    }
    if (channel.sender_at) {
      if (!matches(*channel.sender_at, here)) return false;
      pass(*channel.sender_at);
      channel.sender_at.reset();
      return true;
    }
    channel.receiver_at = here;
    return false;
  }

  // The rank that waited in a transfer continues after it.
  void pass(const Place& waiting) {
    position_[index(waiting.rank)] = waiting.slot + 1;
    enqueue(waiting.rank);
  }

  // Without tags the next send of a communicator is paired with its next receive, even if they do not match.
  bool matches(const Place& send, const Place& receive) {
    if (counterpart(action_at(send)) == action_at(receive)) return true;
    report_.violations.push_back(
        {ViolationKind::TransferOrder,
         fmt::format("{} is paired with {}: the communicator from rank {} to rank {} pairs sends and "
                     "receives in the order in which they are written; write both in the same order",
                     place_text(schedule_, send), place_text(schedule_, receive), send.rank, receive.rank),
         {send, receive}});
    report_.grid = marked_grid(schedule_, {send, receive}, {});
    return false;
  }

  // Everything that the slot of a stuck rank waits for. All of it appears in some rank's row, since no action
  // is missing.
  std::vector<Action> needs_of(int rank) const {
    const Slot slot = schedule_.row(rank)[position_[index(rank)]];
    if (is_send(slot[0].kind()) || is_receive(slot[0].kind())) return {counterpart(slot[0])};
    std::vector<Action> needs;
    for (const Action& action : slot) {
      if (const auto need = unmet_need(action)) needs.push_back(*need);
    }
    return needs;
  }

  struct Edge {
    int to;
    Action need;
  };

  // Breadth-first search from every stuck rank, never deeper than the best cycle found so far. A rank waits
  // for one or two others, so the first search almost always finds a cycle immediately.
  std::vector<std::pair<int, Action>> shortest_cycle() const {
    std::map<int, std::vector<Edge>> edges;
    for (const int rank : stuck_) {
      for (const Action& need : needs_of(rank)) edges[rank].push_back({map_.rank_of(need.stage()), need});
    }
    std::vector<std::pair<int, Action>> best;
    for (const int start : stuck_) {
      std::map<int, std::pair<int, Action>> reached_from;  // rank -> (previous rank, what that one waits for)
      std::deque<std::pair<int, std::size_t>> frontier = {{start, 1}};
      bool found = false;
      while (!frontier.empty() && !found) {
        const auto [rank, length] = frontier.front();
        frontier.pop_front();
        if (!best.empty() && length >= best.size()) break;
        for (const Edge& edge : edges[rank]) {
          if (!reached_from.try_emplace(edge.to, rank, edge.need).second) continue;
          if (edge.to == start) {
            found = true;
            break;
          }
          frontier.emplace_back(edge.to, length + 1);
        }
      }
      if (!found) continue;
      std::vector<std::pair<int, Action>> cycle;
      int at = start;
      do {
        const auto& [from, need] = reached_from.at(at);
        cycle.emplace_back(from, need);
        at = from;
      } while (at != start);
      std::reverse(cycle.begin(), cycle.end());
      if (best.empty() || cycle.size() < best.size()) best = std::move(cycle);
      if (best.size() <= 2) break;  // a rank that waits for itself was already reported as an order violation
    }
    return best;
  }

  Place place_of(const Action& need) const {
    const int rank = map_.rank_of(need.stage());
    const Row& row = schedule_.row(rank);
    for (std::size_t slot = position_[index(rank)]; slot < row.size(); ++slot) {
      for (const Action& action : row[slot]) {
        const bool same_work = action.kind() == need.kind() || (produces_input_gradient(need.kind()) &&
                                                                produces_input_gradient(action.kind()));
        if (same_work && action.stage() == need.stage() && action.microbatch() == need.microbatch())
          return {rank, slot};
      }
    }
    PENSTOCK_INVARIANT(false, "an action that a stuck rank waits for is still to come in its own row");
  }

  void report_deadlock() {
    std::string words = fmt::format("{} of {} ranks wait for each other;", stuck_.size(), map_.ranks());
    Violation violation{ViolationKind::Deadlock, {}, {}};
    std::vector<Place> wanted;
    for (const auto& [rank, need] : shortest_cycle()) {
      const Place at = {rank, position_[index(rank)]};
      const Place needs_at = place_of(need);
      const Slot slot = schedule_.row(rank)[at.slot];
      report_.cycle.push_back({at, waiting_member(slot, need), need, needs_at});
      violation.places.push_back(at);
      wanted.push_back(needs_at);
      words += fmt::format(" {} waits for {} of {}, which comes after {};", place_text(schedule_, at),
                           to_text(need), place_text(schedule_, needs_at),
                           place_text(schedule_, {needs_at.rank, position_[index(needs_at.rank)]}));
    }
    violation.text = words + " change the order on one of these ranks";
    report_.grid = marked_grid(schedule_, violation.places, wanted);
    report_.violations.push_back(std::move(violation));
  }

  // The member of a slot that waits for `need`.
  Action waiting_member(Slot slot, const Action& need) const {
    for (const Action& action : slot) {
      if (is_send(action.kind()) || is_receive(action.kind())) return action;
      const auto unmet = unmet_need(action);
      if (unmet && *unmet == need) return action;
    }
    return slot[0];
  }

  const Schedule& schedule_;
  const StageMap& map_;
  bool lowered_;
  bool posted_sends_;
  Report& report_;
  std::vector<std::size_t> position_;
  std::vector<bool> queued_;
  std::deque<int> runnable_;
  std::vector<std::optional<Action>> waits_for_;
  std::vector<ChannelState> channels_;
  std::vector<std::int32_t> forward_channel_;   // [s]: from stage s to s+1
  std::vector<std::int32_t> backward_channel_;  // [s]: from stage s+1 to s
  std::vector<int> stuck_;
  WorkSet forwards_;
  WorkSet gradients_;
};

}  // namespace

void check_progress(const Schedule& schedule, SendModel sends, Report& report) {
  ProgressCheck(schedule, sends, report).run();
}

}  // namespace penstock::schedule
