#include "penstock/simulator.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/plan/cost/memory_ledger.h"
#include "penstock/schedule/check/work_set.h"
#include "penstock/validate.h"

namespace penstock::plan {

namespace {

using schedule::Action;
using schedule::ActionKind;
using schedule::Place;
using schedule::Row;
using schedule::Schedule;
using schedule::Slot;
using schedule::StageMap;

// When an input becomes available and which slot produced it.
struct Availability {
  double time = -1;
  std::int32_t rank = -1;
  std::uint32_t slot = 0;
  bool is_known() const { return rank >= 0; }
};

// One communicator: one direction between two ranks.
struct SimulatedChannel {
  struct Post {
    Place at;
    double time;
    Cause cause;  // why it was not posted earlier
  };
  std::deque<Post> sends;     // posted and not yet matched
  std::deque<Post> receives;  // likewise
  double free = 0;            // when the previous transfer no longer occupies the link
  std::optional<Place> last_send;
};

class Simulator {
 public:
  Simulator(const Schedule& schedule, const CostModel& model, const SimulateOptions& options)
      : schedule_(schedule),
        map_(schedule.stages()),
        model_(model),
        options_(options),
        lowered_(schedule.has_transfers()),
        blocking_(model.communication == Communication::Blocking),
        microbatches_(static_cast<std::size_t>(map_.microbatches())),
        ranks_(static_cast<std::size_t>(map_.ranks())),
        activations_(static_cast<std::size_t>(map_.stages()) * microbatches_),
        gradients_(activations_.size()),
        gathered_(static_cast<std::size_t>(map_.stages())),
        forwards_(map_),
        inputs_(map_) {
    result_.slots.resize(ranks_.size());
    result_.ranks.resize(ranks_.size());
    if (options.memory_curve) result_.memory_curve.resize(ranks_.size());
    ledgers_.reserve(ranks_.size());
    std::vector<std::vector<int>> stages_of(ranks_.size());
    for (int stage = 0; stage < map_.stages(); ++stage) stages_of[at(map_.rank_of(stage))].push_back(stage);
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      ledgers_.emplace_back(model_, stages_of[at(rank)]);
      result_.slots[at(rank)].resize(schedule.row(rank).size());
      if (options.memory_curve) note_memory(rank, 0);
    }
    name_channels();
  }

  Simulation run() {
    for (int rank = 0; rank < map_.ranks(); ++rank) wake(rank);
    while (!runnable_.empty()) {
      const int rank = runnable_.front();
      runnable_.pop_front();
      SimulatedRank& state = ranks_[at(rank)];
      state.queued = false;
      const Row& row = schedule_.row(rank);
      while (state.position < row.size() && step(rank, state, row[state.position])) ++state.position;
    }
    for (int rank = 0; rank < map_.ranks(); ++rank) {
      if (ranks_[at(rank)].position < schedule_.row(rank).size()) stalled(rank);
    }
    for (const SimulatedChannel& channel : channels_) {
      if (!channel.sends.empty()) stalled(channel.sends.front().at.rank);
      if (!channel.receives.empty()) stalled(channel.receives.front().at.rank);
    }
    summarize();
    trace_critical_path();
    return std::move(result_);
  }

 private:
  struct SimulatedRank {
    std::size_t position = 0;
    double clock = 0;                        // when the rank is free
    std::optional<std::uint32_t> last_slot;  // the slot that kept it busy until then
    double collective_free = 0;
    std::optional<std::uint32_t> last_collective;
    bool queued = false;
    bool computed = false;
  };

  static std::size_t at(int index) { return static_cast<std::size_t>(index); }
  std::size_t key(int stage, int microbatch) const { return at(stage) * microbatches_ + at(microbatch); }

  void name_channels() {
    forward_channel_.assign(at(map_.stages()), -1);
    backward_channel_ = forward_channel_;
    std::map<std::tuple<int, int, bool>, int> known;
    const auto name = [&](int from, int to, bool is_forward) {
      const auto [found, fresh] =
          known.try_emplace({from, to, is_forward}, static_cast<int>(channels_.size()));
      if (fresh) channels_.emplace_back();
      return found->second;
    };
    for (int stage = 0; stage + 1 < map_.stages(); ++stage) {
      const int from = map_.rank_of(stage);
      const int to = map_.rank_of(stage + 1);
      if (map_.is_last(stage) || from == to) continue;
      forward_channel_[at(stage)] = name(from, to, true);
      backward_channel_[at(stage)] = name(to, from, false);
    }
  }

  void wake(int rank) {
    SimulatedRank& state = ranks_[at(rank)];
    if (state.queued) return;
    state.queued = true;
    runnable_.push_back(rank);
  }

  Cause previous(int rank, const SimulatedRank& state) const {
    if (!state.last_slot) return {};
    return {Cause::Kind::Previous, rank, *state.last_slot};
  }

  // Returns true if the slot was executed (or posted), false if the rank must wait for another rank.
  bool step(int rank, SimulatedRank& state, Slot slot) {
    TimedSlot& timed = result_.slots[at(rank)][state.position];
    if (slot.empty()) {
      timed = {state.clock, state.clock, previous(rank, state)};
      return true;
    }
    const ActionKind kind = slot[0].kind();
    if (is_send(kind) || is_receive(kind)) return transfer(rank, state, slot[0]);
    if (is_stage_wide(kind)) {
      collective(rank, state, slot[0], timed);
      return true;
    }
    return compute(rank, state, slot, timed);
  }

  bool compute(int rank, SimulatedRank& state, Slot slot, TimedSlot& timed) {
    double start = state.clock;
    Cause cause = previous(rank, state);
    for (const Action& action : slot) {
      const int stage = action.stage();
      const int microbatch = *action.microbatch();
      const Availability* need = nullptr;
      switch (action.kind()) {
        case ActionKind::Forward:
          if (!map_.is_first(action.stage())) need = &activations_[key(stage, microbatch)];
          break;
        case ActionKind::Backward:
        case ActionKind::BackwardInput:
          if (!forwards_.contains(stage, microbatch)) return false;
          if (!map_.is_last(action.stage())) need = &gradients_[key(stage, microbatch)];
          break;
        case ActionKind::BackwardWeight:
          if (!inputs_.contains(stage, microbatch)) return false;
          break;
        default:
          break;
      }
      if (need != nullptr && !need->is_known()) return false;
      for (const Availability* arrival : {need, static_cast<const Availability*>(&gathered_[at(stage)])}) {
        if (arrival == nullptr || arrival->time <= start) continue;
        start = arrival->time;
        cause = {Cause::Kind::Data, arrival->rank, arrival->slot};
      }
    }
    const double end = start + model_.time_of(slot);
    timed = {start, end, cause};
    RankSummary& summary = result_.ranks[at(rank)];
    if (!state.computed) summary.first = start;
    state.computed = true;
    summary.last = end;
    summary.busy += end - start;
    state.clock = end;
    state.last_slot = static_cast<std::uint32_t>(state.position);
    MemoryLedger& ledger = ledgers_[at(rank)];
    for (const Action& action : slot) ledger.begin(action);
    if (options_.memory_curve) note_memory(rank, start);
    for (const Action& action : slot) ledger.end(action);
    if (options_.memory_curve) note_memory(rank, end);
    for (const Action& action : slot) deliver(rank, state, action, end);
    return true;
  }

  // Delivers the result of F, B or I to the adjacent stage: immediately on the same rank, by an implicit
  // transfer in a compute-only schedule; in a lowered schedule a SEND delivers it.
  void deliver(int rank, SimulatedRank& state, const Action& action, double end) {
    const int stage = action.stage();
    const int microbatch = *action.microbatch();
    if (action.kind() == ActionKind::BackwardWeight) return;
    const bool is_forward = action.kind() == ActionKind::Forward;
    (is_forward ? forwards_ : inputs_).insert(stage, microbatch);
    if (is_forward ? map_.is_last(action.stage()) : map_.is_first(action.stage())) return;
    const int to = is_forward ? stage + 1 : stage - 1;
    const int to_rank = map_.rank_of(to);
    Availability arrival = {end, rank, static_cast<std::uint32_t>(state.position)};
    if (to_rank != rank) {
      if (lowered_) return;
      const int border = std::min(stage, to);
      const int channel_index = (is_forward ? forward_channel_ : backward_channel_)[at(border)];
      SimulatedChannel& channel = channels_[at(channel_index)];
      const double start = std::max(blocking_ ? state.clock : end, channel.free);
      channel.free = start + model_.occupancy(border);
      arrival.time = start + model_.transfer_time(border);
      if (blocking_) state.clock = arrival.time;
    }
    (is_forward ? activations_ : gradients_)[key(to, microbatch)] = arrival;
    wake(to_rank);
  }

  void collective(int rank, SimulatedRank& state, const Action& action, TimedSlot& timed) {
    const int stage = action.stage();
    const double time = model_.time_of(action.kind(), stage);
    const auto slot = static_cast<std::uint32_t>(state.position);
    timed.start = state.clock;
    timed.cause = previous(rank, state);
    if (!blocking_ && action.kind() != ActionKind::Reshard) {
      if (state.collective_free > timed.start) {
        timed.start = state.collective_free;
        timed.cause = {Cause::Kind::Link, rank, *state.last_collective};
      }
      state.collective_free = timed.start + time;
      state.last_collective = slot;
    }
    timed.end = timed.start + time;
    if (blocking_ && time > 0) {
      state.clock = timed.end;
      state.last_slot = slot;
    }
    MemoryLedger& ledger = ledgers_[at(rank)];
    ledger.begin(action);
    ledger.end(action);
    if (options_.memory_curve) note_memory(rank, timed.start);
    if (action.kind() == ActionKind::Unshard) gathered_[at(stage)] = {timed.end, rank, slot};
  }

  bool transfer(int rank, SimulatedRank& state, const Action& action) {
    const int stage = action.stage();
    const bool is_forward =
        action.kind() == ActionKind::SendForward || action.kind() == ActionKind::RecvForward;
    const bool sending = is_send(action.kind());
    const int border = sending == is_forward ? stage : stage - 1;
    const int channel_index =
        border < 0 ? -1 : (is_forward ? forward_channel_ : backward_channel_)[at(border)];
    if (channel_index < 0) return false;  // nothing is transferred there: `stalled` reports it
    SimulatedChannel& channel = channels_[at(channel_index)];
    if (sending && !(is_forward ? forwards_ : inputs_).contains(stage, *action.microbatch())) return false;
    const Place here = {rank, state.position};
    auto& own = sending ? channel.sends : channel.receives;
    const auto& other = sending ? channel.receives : channel.sends;
    if (blocking_ && !own.empty()) return false;  // already waiting here
    own.push_back({here, state.clock, previous(rank, state)});
    if (other.empty()) return !blocking_;
    const int peer = other.front().at.rank;
    match(channel, border, is_forward);
    if (blocking_) ++ranks_[at(peer)].position;  // the peer was waiting in its side of the transfer
    wake(peer);
    return true;
  }

  // Matches the first send and the first receive of the communicator.
  void match(SimulatedChannel& channel, int border, bool is_forward) {
    const SimulatedChannel::Post send = channel.sends.front();
    const SimulatedChannel::Post receive = channel.receives.front();
    channel.sends.pop_front();
    channel.receives.pop_front();
    const Action& sent = schedule_.row(send.at.rank)[send.at.slot][0];
    const Action& received = schedule_.row(receive.at.rank)[receive.at.slot][0];
    if (sent.microbatch() != received.microbatch() ||
        sent.stage() + (is_forward ? 1 : -1) != received.stage()) {
      stalled(send.at.rank);
    }
    const auto because = [](Cause::Kind kind, const Place& place) {
      return Cause{kind, place.rank, static_cast<std::uint32_t>(place.slot)};
    };
    const bool sender_last = send.time >= receive.time;
    TimedSlot at_sender = {std::max(send.time, receive.time), 0,
                           sender_last ? send.cause : because(Cause::Kind::Peer, receive.at)};
    TimedSlot at_receiver = {0, 0, sender_last ? because(Cause::Kind::Peer, send.at) : receive.cause};
    if (channel.free > at_sender.start) {
      at_sender.start = channel.free;
      at_sender.cause = because(Cause::Kind::Link, *channel.last_send);
      at_receiver.cause = because(Cause::Kind::Peer, send.at);
    }
    channel.free = at_sender.start + model_.occupancy(border);
    channel.last_send = send.at;
    const double end = at_sender.start + model_.transfer_time(border);
    at_receiver.start = at_sender.start;
    at_sender.end = at_receiver.end = end;
    result_.slots[at(send.at.rank)][send.at.slot] = at_sender;
    result_.slots[at(receive.at.rank)][receive.at.slot] = at_receiver;
    (is_forward ? activations_ : gradients_)[key(received.stage(), *received.microbatch())] = {
        end, receive.at.rank, static_cast<std::uint32_t>(receive.at.slot)};
    if (!blocking_) return;
    for (const Place& place : {send.at, receive.at}) {
      ranks_[at(place.rank)].clock = end;
      ranks_[at(place.rank)].last_slot = static_cast<std::uint32_t>(place.slot);
    }
  }

  [[noreturn]] void stalled(int rank) const {
    schedule::ValidateOptions options;
    options.sends = blocking_ ? schedule::SendModel::Blocking : schedule::SendModel::Posted;
    schedule::Report report = schedule::check(schedule_, options);
    PENSTOCK_INVARIANT(!report.ok(),
                       fmt::format("rank {} cannot continue, yet the schedule passes its check", rank));
    throw schedule::ScheduleError(std::move(report));
  }

  void note_memory(int rank, double time) {
    const MemoryLedger& ledger = ledgers_[at(rank)];
    result_.memory_curve[at(rank)].push_back({time, ledger.bytes(), ledger.activations()});
  }

  void summarize() {
    for (const auto& row : result_.slots) {
      for (const TimedSlot& timed : row) result_.time = std::max(result_.time, timed.end);
    }
    for (const SimulatedRank& state : ranks_) result_.time = std::max(result_.time, state.clock);
    double idle = 0;
    double idle_in_span = 0;
    double span = 0;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      RankSummary& summary = result_.ranks[rank];
      // Sums of many times differ from the step's time in the last digits; idle time is never negative.
      summary.idle = std::max(0.0, result_.time - summary.busy);
      summary.peak_activations = ledgers_[rank].peak_activations();
      summary.peak_bytes = ledgers_[rank].peak_bytes();
      idle += summary.idle;
      idle_in_span += std::max(0.0, summary.last - summary.first - summary.busy);
      span += summary.last - summary.first;
    }
    if (result_.time > 0) result_.bubble = idle / (result_.time * static_cast<double>(ranks_.size()));
    if (span > 0) result_.span_bubble = idle_in_span / span;
  }

  // Follows the causes backwards from the slot that ends last.
  void trace_critical_path() {
    std::optional<Cause> next;
    double latest = -1;
    for (std::size_t rank = 0; rank < result_.slots.size(); ++rank) {
      for (std::size_t slot = 0; slot < result_.slots[rank].size(); ++slot) {
        if (result_.slots[rank][slot].end <= latest || schedule_.row(static_cast<int>(rank))[slot].empty())
          continue;
        latest = result_.slots[rank][slot].end;
        next =
            Cause{Cause::Kind::Previous, static_cast<std::int32_t>(rank), static_cast<std::uint32_t>(slot)};
      }
    }
    while (next) {
      const TimedSlot& timed = result_.slots[at(next->rank)][next->slot];
      result_.critical_path.push_back({next->rank, next->slot, timed.start, timed.end, timed.cause});
      if (timed.cause.kind == Cause::Kind::Begin) break;
      next = timed.cause;
    }
    std::reverse(result_.critical_path.begin(), result_.critical_path.end());
  }

  const Schedule& schedule_;
  const StageMap& map_;
  const CostModel& model_;
  const SimulateOptions& options_;
  bool lowered_;
  bool blocking_;
  std::size_t microbatches_;
  std::vector<SimulatedRank> ranks_;
  std::deque<int> runnable_;
  std::vector<Availability> activations_;  // [stage, microbatch]: the input of F
  std::vector<Availability> gradients_;    // [stage, microbatch]: the input of B or I
  std::vector<Availability> gathered_;     // [stage]: its parameters, if the schedule gathers them
  std::vector<SimulatedChannel> channels_;
  std::vector<int> forward_channel_;   // [s]: from stage s to s+1; -1 if both are on the same rank
  std::vector<int> backward_channel_;  // [s]: from stage s+1 to s
  std::vector<MemoryLedger> ledgers_;
  schedule::WorkSet forwards_;
  schedule::WorkSet inputs_;
  Simulation result_;
};

// Checks what the simulator's lookups rely on.
void check_places(const Schedule& schedule) {
  schedule::check_numbers(schedule);
  schedule::check_density(schedule);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Slot slot : schedule.row(rank)) {
      const bool alone = slot.size() <= 1;
      for (const Action& action : slot) {
        if (schedule.stages().rank_of(action.stage()) != rank || !(alone || is_compute(action.kind()))) {
          schedule::Report report = schedule::check(schedule);
          PENSTOCK_INVARIANT(!report.ok(), fmt::format("{} cannot be on rank {}", to_text(action), rank));
          throw schedule::ScheduleError(std::move(report));
        }
      }
    }
  }
}

}  // namespace

int Simulation::peak_activations() const {
  int peak = 0;
  for (const RankSummary& rank : ranks) peak = std::max(peak, rank.peak_activations);
  return peak;
}

std::int64_t Simulation::peak_bytes() const {
  std::int64_t peak = 0;
  for (const RankSummary& rank : ranks) peak = std::max(peak, rank.peak_bytes);
  return peak;
}

Simulation simulate(const Schedule& schedule, const CostModel& model, const SimulateOptions& options) {
  model.check(schedule.stages(), schedule.microbatches());
  check_places(schedule);
  return Simulator(schedule, model, options).run();
}

std::string waited_for(const Schedule& schedule, const Simulation& simulation, const Cause& cause,
                       double start) {
  if (cause.kind == Cause::Kind::Begin) return "the beginning of the step";
  const Slot slot = schedule.row(cause.rank)[cause.slot];
  const TimedSlot& timed = simulation.slots[static_cast<std::size_t>(cause.rank)][cause.slot];
  std::string words = fmt::format("{} on rank {}, ended at {:.6g}", to_text(slot), cause.rank, timed.end);
  if (cause.kind == Cause::Kind::Data && start > timed.end)
    words += fmt::format(", arrived at {:.6g}", start);
  if (cause.kind == Cause::Kind::Peer) words += " (the other side of the transfer)";
  return words;
}

}  // namespace penstock::plan
