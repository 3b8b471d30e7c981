#include "penstock/pipeline/program/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/lower.h"
#include "penstock/validate.h"

namespace penstock {

using schedule::Action;
using schedule::ActionKind;
using schedule::Row;
using schedule::Schedule;
using schedule::Slot;
using schedule::StageMap;

std::string to_text(const Channel& channel) {
  return fmt::format("{}{} of stage {} to stage {}",
                     channel.skip < 0 ? "" : fmt::format("skip {}: ", channel.skip),
                     channel.kind == Channel::Kind::Activation ? "activation" : "gradient",
                     channel.from_stage, channel.to_stage);
}

std::string_view to_text(Instruction::Kind kind) {
  switch (kind) {
    case Instruction::Kind::Compute:
      return "compute";
    case Instruction::Kind::Post:
      return "post";
    case Instruction::Kind::Await:
      return "await";
    case Instruction::Kind::Send:
      return "send";
    case Instruction::Kind::Pass:
      return "pass";
    case Instruction::Kind::Stage:
      return "stage";
  }
  PENSTOCK_INVARIANT(false, "an instruction of an unknown kind");
}

std::string to_text(const Program& program, const Instruction& instruction) {
  std::string text = fmt::format("{} {}", to_text(instruction.kind), schedule::to_text(instruction.action));
  if (instruction.channel >= 0)
    text += fmt::format(" ({})", to_text(program.channels[static_cast<std::size_t>(instruction.channel)]));
  return text;
}

int Program::find_channel(Channel::Kind kind, int from_stage, int to_stage, int skip) const {
  for (std::size_t i = 0; i < channels.size(); ++i) {
    const Channel& each = channels[i];
    if (each.kind == kind && each.from_stage == from_stage && each.to_stage == to_stage && each.skip == skip)
      return static_cast<int>(i);
  }
  return -1;
}

namespace {

void check_skips(const StageMap& map, const std::vector<SkipConnection>& skips) {
  for (std::size_t i = 0; i < skips.size(); ++i) {
    const SkipConnection& skip = skips[i];
    const bool inside = map.has_stage(skip.from) && map.has_stage(skip.to);
    if (!inside || skip.to <= skip.from || &map.chain_of(skip.from) != &map.chain_of(skip.to))
      throw ValueError(describe(
          fmt::format("skip connection {}", i), fmt::format("from stage {} to stage {}", skip.from, skip.to),
          fmt::format("from an earlier to a later one of the {} stages, both in the same chain",
                      map.stages()),
          "declare it from the stage that makes the tensor to the later stage that takes it"));
  }
}

class Compiler {
 public:
  Compiler(const Schedule& schedule, int rank, const std::vector<SkipConnection>& skips,
           const ProgramOptions& options)
      : schedule_(schedule), map_(schedule.stages()), skips_(skips), options_(options) {
    program_.rank = rank;
    program_.has_backward = options.has_backward;
    find_channels();
    for (std::size_t i = 0; i < program_.channels.size(); ++i)
      incoming_.push_back({order_of_sends(program_.channels[i])});
  }

  Program run() {
    for (const Slot slot : schedule_.row(program_.rank)) add_slot(slot);
    post_earlier();
    return std::move(program_);
  }

 private:
  // Microbatches of a channel that ends on this rank, in the order of its sends, and how many of them are
  // posted.
  struct Incoming {
    std::vector<int> order;
    std::size_t posted = 0;
  };

  int here() const { return program_.rank; }

  void add_channel(Channel::Kind kind, int from, int to, int skip) {
    const int from_rank = map_.rank_of(from);
    const int to_rank = map_.rank_of(to);
    if (from_rank != here() && to_rank != here()) return;
    program_.channels.push_back({kind, from, to, skip, from_rank, to_rank});
  }

  void add_both(int from, int to, int skip) {
    add_channel(Channel::Kind::Activation, from, to, skip);
    if (options_.has_backward) add_channel(Channel::Kind::Gradient, to, from, skip);
  }

  void find_channels() {
    for (int stage = 0; stage < map_.stages(); ++stage)
      if (!map_.is_last(stage)) add_both(stage, stage + 1, -1);
    for (std::size_t i = 0; i < skips_.size(); ++i)
      add_both(skips_[i].from, skips_[i].to, static_cast<int>(i));
  }

  // Skip connections are sent as soon as the data is made; data for neighbours where the schedule says so.
  std::vector<int> order_of_sends(const Channel& channel) const {
    std::vector<int> order;
    if (channel.local() || channel.to_rank != here()) return order;
    const bool forward = channel.kind == Channel::Kind::Activation;
    for (const Slot slot : schedule_.row(channel.from_rank)) {
      for (const Action& action : slot) {
        if (action.stage() != channel.from_stage) continue;
        const ActionKind kind = action.kind();
        const bool sends =
            channel.skip < 0
                ? kind == (forward ? ActionKind::SendForward : ActionKind::SendBackward)
                : (forward ? kind == ActionKind::Forward : schedule::produces_input_gradient(kind));
        if (sends) order.push_back(*action.microbatch());
      }
    }
    return order;
  }

  void emit(Instruction::Kind kind, const Action& action, int channel = -1, int members = 1) {
    program_.instructions.push_back({kind, action, channel, members});
  }

  static Action transfer(bool forward, bool receive, int stage, int microbatch) {
    const ActionKind kind = forward ? (receive ? ActionKind::RecvForward : ActionKind::SendForward)
                                    : (receive ? ActionKind::RecvBackward : ActionKind::SendBackward);
    return {kind, stage, microbatch};
  }
  bool is_forward(int channel) const {
    return program_.channels[static_cast<std::size_t>(channel)].kind == Channel::Kind::Activation;
  }

  void post_next(int channel) {
    Incoming& incoming = incoming_[static_cast<std::size_t>(channel)];
    const int microbatch = incoming.order[incoming.posted++];
    emit(Instruction::Kind::Post,
         transfer(is_forward(channel), true, program_.channels[static_cast<std::size_t>(channel)].to_stage,
                  microbatch),
         channel);
  }

  // Receives are posted in the order of the sends, so earlier ones are posted first.
  void ensure_posted(int channel, int microbatch) {
    Incoming& incoming = incoming_[static_cast<std::size_t>(channel)];
    const auto begin = incoming.order.begin();
    const auto at = std::find(begin, incoming.order.end(), microbatch);
    PENSTOCK_INVARIANT(at != incoming.order.end(), "a validated schedule sends everything that is received");
    while (incoming.posted <= static_cast<std::size_t>(at - begin)) post_next(channel);
  }

  template <class Visit>
  void for_channels_into(int stage, Channel::Kind kind, Visit visit) const {
    for (std::size_t i = 0; i < program_.channels.size(); ++i)
      if (program_.channels[i].kind == kind && program_.channels[i].to_stage == stage)
        visit(static_cast<int>(i), program_.channels[i]);
  }
  template <class Visit>
  void for_channels_from(int stage, Channel::Kind kind, Visit visit) const {
    for (std::size_t i = 0; i < program_.channels.size(); ++i)
      if (program_.channels[i].kind == kind && program_.channels[i].from_stage == stage)
        visit(static_cast<int>(i), program_.channels[i]);
  }

  void add_awaits(const Action& action) {
    const bool forward = action.kind() == ActionKind::Forward;
    if (!forward && !schedule::produces_input_gradient(action.kind())) return;
    const int microbatch = *action.microbatch();
    std::vector<int> needed;
    for_channels_into(action.stage(), forward ? Channel::Kind::Activation : Channel::Kind::Gradient,
                      [&](int index, const Channel& channel) {
                        if (!channel.local()) needed.push_back(index);
                      });
    for (const int channel : needed) ensure_posted(channel, microbatch);
    for (const int channel : needed)
      emit(Instruction::Kind::Await, transfer(forward, true, action.stage(), microbatch), channel);
  }

  void add_handing_on(const Action& action) {
    const bool forward = action.kind() == ActionKind::Forward;
    if (!forward && !schedule::produces_input_gradient(action.kind())) return;
    const int stage = action.stage();
    const Action made = transfer(forward, false, stage, *action.microbatch());
    std::vector<std::pair<Instruction::Kind, int>> found;
    for_channels_from(stage, forward ? Channel::Kind::Activation : Channel::Kind::Gradient,
                      [&](int index, const Channel& channel) {
                        if (channel.local())
                          found.emplace_back(Instruction::Kind::Pass, index);
                        else if (channel.skip >= 0)
                          found.emplace_back(Instruction::Kind::Send, index);
                      });
    for (const auto& [kind, channel] : found) emit(kind, made, channel);
  }

  void add_slot(Slot slot) {
    std::vector<Action> unit;
    for (const Action& action : slot)
      if (schedule::is_compute(action.kind())) unit.push_back(action);
    if (!unit.empty()) {
      for (const Action& action : unit) add_awaits(action);
      for (std::size_t i = 0; i < unit.size(); ++i)
        emit(Instruction::Kind::Compute, unit[i], -1, i == 0 ? static_cast<int>(unit.size()) : 0);
      for (const Action& action : unit) add_handing_on(action);
    }
    for (const Action& action : slot) {
      if (schedule::is_compute(action.kind())) continue;
      if (schedule::is_stage_wide(action.kind())) {
        emit(Instruction::Kind::Stage, action);
        continue;
      }
      add_transfer(action);
    }
  }

  void add_transfer(const Action& action) {
    const int stage = action.stage();
    const int microbatch = *action.microbatch();
    switch (action.kind()) {
      case ActionKind::RecvForward:
        return ensure_posted(channel_of(Channel::Kind::Activation, stage - 1, stage), microbatch);
      case ActionKind::RecvBackward:
        return ensure_posted(channel_of(Channel::Kind::Gradient, stage + 1, stage), microbatch);
      case ActionKind::SendForward:
        return emit(Instruction::Kind::Send, action, channel_of(Channel::Kind::Activation, stage, stage + 1));
      default:
        return emit(Instruction::Kind::Send, action, channel_of(Channel::Kind::Gradient, stage, stage - 1));
    }
  }

  int channel_of(Channel::Kind kind, int from, int to) const {
    const int found = program_.find_channel(kind, from, to);
    PENSTOCK_INVARIANT(found >= 0, "a validated schedule transfers between neighbouring stages only");
    return found;
  }

  // Every post moves up past the same number of compute units, so posts keep their relative order.
  void post_earlier() {
    std::vector<Instruction> others, posts;
    std::vector<std::size_t> unit_starts;              // positions in `others`
    std::multimap<std::size_t, Instruction> posts_at;  // by position in `others` before which they go
    for (const Instruction& each : program_.instructions) {
      if (each.kind == Instruction::Kind::Post) {
        const std::size_t ahead = static_cast<std::size_t>(options_.post_ahead);
        const std::size_t at = unit_starts.size() <= ahead ? 0
                               : ahead == 0                ? others.size()
                                                           : unit_starts[unit_starts.size() - ahead];
        posts_at.emplace(at, each);
      } else {
        if (each.kind == Instruction::Kind::Compute && each.members > 0) unit_starts.push_back(others.size());
        others.push_back(each);
      }
    }
    std::vector<Instruction> result;
    result.reserve(program_.instructions.size());
    auto next = posts_at.begin();
    for (std::size_t i = 0; i <= others.size(); ++i) {
      for (; next != posts_at.end() && next->first == i; ++next) result.push_back(next->second);
      if (i < others.size()) result.push_back(others[i]);
    }
    program_.instructions = std::move(result);
  }

  const Schedule& schedule_;
  const StageMap& map_;
  const std::vector<SkipConnection>& skips_;
  const ProgramOptions options_;
  Program program_;
  std::vector<Incoming> incoming_;  // by channel
};

}  // namespace

Program compile_program(const Schedule& lowered, int rank, const std::vector<SkipConnection>& skips,
                        const ProgramOptions& options) {
  if (rank < 0 || rank >= lowered.ranks())
    throw ValueError(describe("pipeline rank", std::to_string(rank),
                              fmt::format("0 to {}", lowered.ranks() - 1),
                              "use a schedule made for as many ranks as the pipeline has"));
  if (options.post_ahead < 0)
    throw ValueError(describe("post_ahead", std::to_string(options.post_ahead), "0 or more",
                              "0 posts a receive where the schedule has it"));
  check_skips(lowered.stages(), skips);
  return Compiler(lowered, rank, skips, options).run();
}

Schedule forward_only(const Schedule& schedule) {
  Schedule forwards(schedule.stages());
  for (int rank = 0; rank < schedule.ranks(); ++rank)
    for (const Slot slot : schedule.row(rank))
      for (const Action& action : slot)
        if (action.kind() == ActionKind::Forward) forwards.row(rank).push(action);
  return schedule::add_send_receive(forwards);
}

Schedule executable(Schedule schedule, bool unshard) {
  // On one rank a lowered schedule has no transfers either.
  if (!schedule::is_compute_only(schedule))
    return schedule::validate(std::move(schedule), {.sends = schedule::SendModel::Posted});
  return schedule::lower(schedule::validate(std::move(schedule)), {.unshard = unshard});
}

}  // namespace penstock
