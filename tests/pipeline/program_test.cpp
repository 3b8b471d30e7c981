// Programs of all schedules, executed by threads without Torch: every action finds its data, transfers match
// in order without tags, and no rank waits forever. Also lets the race detector check the loop and its
// observers.
#include "penstock/pipeline/program/program.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "penstock/errors.h"
#include "penstock/generators.h"
#include "penstock/lower.h"
#include "penstock/pipeline/program/executor.h"
#include "penstock/schedule.h"
#include "penstock/validate.h"
#include "tests/has_text.h"

namespace penstock {
namespace program_test {

using schedule::Action;
using schedule::ActionKind;
using schedule::PipelineShape;
using schedule::Schedule;
using schedule::ScheduleKind;
using namespace std::chrono_literals;

// Between ranks: a queue without tags per channel; the n-th send matches the n-th receive.
class Wires {
 public:
  using Key = std::tuple<Channel::Kind, int, int, int>;
  static Key key(const Channel& channel) {
    return {channel.kind, channel.from_stage, channel.to_stage, channel.skip};
  }

  void send(const Channel& channel, int microbatch) {
    const std::lock_guard lock(mutex_);
    queues_[key(channel)].push_back(microbatch);
    arrived_.notify_all();
  }
  // Returns what arrived n-th; -1 if nothing arrived in time.
  int receive(const Channel& channel, std::size_t nth) {
    std::unique_lock lock(mutex_);
    auto& queue = queues_[key(channel)];
    return arrived_.wait_for(lock, 20s, [&] { return queue.size() > nth; }) ? queue[nth] : -1;
  }
  // Total number of sends on every channel.
  std::size_t sent() const {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const auto& [name, queue] : queues_) count += queue.size();
    return count;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<Key, std::deque<int>> queues_;
};

// Executes instructions on tokens and records every action that did not find what it needs.
class Tokens final : public StepActions {
 public:
  Tokens(const Program& program, const schedule::StageMap& map, Wires& wires)
      : program_(program), map_(map), wires_(wires) {}

  void compute(std::span<const Instruction> unit) override {
    for (const Instruction& each : unit) run(each.action);
  }
  void post(const Instruction& instruction, const Channel& channel) override {
    posted_[{instruction.channel, *instruction.action.microbatch()}] = next_[instruction.channel]++;
    if (channel.to_rank != program_.rank) report("receives on another rank's channel", instruction);
  }
  void await(const Instruction& instruction, const Channel& channel) override {
    const int microbatch = *instruction.action.microbatch();
    const auto at = posted_.find({instruction.channel, microbatch});
    if (at == posted_.end()) return report("waits for a receive that was not posted", instruction);
    if (wires_.receive(channel, at->second) != microbatch)
      return report("another microbatch arrived, or none", instruction);
    arrive(channel, microbatch);
  }
  void send(const Instruction& instruction, const Channel& channel) override {
    check_made(instruction, channel);
    wires_.send(channel, *instruction.action.microbatch());
  }
  void pass(const Instruction& instruction, const Channel& channel) override {
    check_made(instruction, channel);
    arrive(channel, *instruction.action.microbatch());
  }
  void stage_wide(const Instruction& instruction) override { ++stage_wide_[instruction.action.kind()]; }
  void finish() override { finished_ = true; }

  const std::vector<std::string>& problems() const { return problems_; }
  bool finished() const { return finished_; }
  std::size_t done(ActionKind kind) const {
    std::size_t count = 0;
    for (const auto& action : done_) count += action.first == kind;
    return count;
  }

 private:
  using Work = std::pair<ActionKind, std::pair<int, int>>;  // kind, stage, microbatch

  bool has(ActionKind kind, int stage, int microbatch) const {
    return done_.contains({kind, {stage, microbatch}});
  }
  void arrive(const Channel& channel, int microbatch) {
    ++here_[{channel.kind, {channel.to_stage, microbatch}}];
  }
  int needed(Channel::Kind kind, int stage) const {
    int count = 0;
    for (const Channel& channel : program_.channels)
      count += channel.kind == kind && channel.to_stage == stage;
    return count;
  }

  void run(const Action& action) {
    const int stage = action.stage(), microbatch = *action.microbatch();
    const Work work{action.kind(), {stage, microbatch}};
    if (map_.rank_of(action.stage()) != program_.rank)
      problems_.push_back("on the wrong rank: " + schedule::to_text(action));
    if (!done_.insert(work).second) problems_.push_back("twice: " + schedule::to_text(action));
    const bool backward = action.kind() == ActionKind::Backward || action.kind() == ActionKind::BackwardInput;
    if (action.kind() == ActionKind::Forward &&
        (here_[{Channel::Kind::Activation, {stage, microbatch}}] != needed(Channel::Kind::Activation, stage)))
      problems_.push_back("without all of its inputs: " + schedule::to_text(action));
    if (backward &&
        (!has(ActionKind::Forward, stage, microbatch) ||
         here_[{Channel::Kind::Gradient, {stage, microbatch}}] != needed(Channel::Kind::Gradient, stage)))
      problems_.push_back("without forward or gradients: " + schedule::to_text(action));
    if (action.kind() == ActionKind::BackwardWeight && !has(ActionKind::BackwardInput, stage, microbatch))
      problems_.push_back("without I: " + schedule::to_text(action));
  }
  void check_made(const Instruction& instruction, const Channel& channel) {
    const int microbatch = *instruction.action.microbatch();
    const bool made = channel.kind == Channel::Kind::Activation
                          ? has(ActionKind::Forward, channel.from_stage, microbatch)
                          : has(ActionKind::Backward, channel.from_stage, microbatch) ||
                                has(ActionKind::BackwardInput, channel.from_stage, microbatch);
    if (!made) report("sends what it has not made", instruction);
  }
  void report(const std::string& what, const Instruction& instruction) {
    problems_.push_back(what + ": " + to_text(program_, instruction));
  }

  const Program& program_;
  const schedule::StageMap& map_;
  Wires& wires_;
  std::set<Work> done_;
  std::map<std::pair<Channel::Kind, std::pair<int, int>>, int> here_;
  std::map<std::pair<int, int>, std::size_t> posted_;
  std::map<int, std::size_t> next_;
  std::map<ActionKind, int> stage_wide_;
  std::vector<std::string> problems_;
  bool finished_ = false;
};

void execute_everywhere(const Schedule& lowered, const std::vector<SkipConnection>& skips,
                        const ProgramOptions& options) {
  Wires wires;
  std::vector<Program> programs;
  std::deque<StepProgress> progress(static_cast<std::size_t>(lowered.ranks()));
  std::deque<Tokens> ranks;
  for (int rank = 0; rank < lowered.ranks(); ++rank)
    programs.push_back(compile_program(lowered, rank, skips, options));
  for (const Program& program : programs) ranks.emplace_back(program, lowered.stages(), wires);
  std::atomic<bool> stop = false;
  std::thread watcher([&] {
    while (!stop) {
      for (const StepProgress& each : progress) {
        const StepProgress::Now now = each.read();
        EXPECT_GE(now.instruction, StepProgress::kInferring);
      }
      std::this_thread::sleep_for(100us);
    }
  });
  std::vector<std::vector<TimedInstruction>> times(programs.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < programs.size(); ++rank)
    threads.emplace_back([&, rank] {
      progress[rank].begin_step();
      execute(programs[rank], ranks[rank], progress[rank], &times[rank]);
    });
  for (std::thread& each : threads) each.join();
  stop = true;
  watcher.join();
  std::size_t forwards = 0, transfers = 0;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    EXPECT_TRUE(ranks[rank].finished());
    EXPECT_EQ(ranks[rank].problems(), std::vector<std::string>{}) << "rank " << rank;
    EXPECT_EQ(progress[rank].read().instruction, StepProgress::kNone);
    ASSERT_EQ(times[rank].size(), programs[rank].instructions.size() + 1);
    for (std::size_t i = 1; i < times[rank].size(); ++i)
      EXPECT_GE(times[rank][i].end_ns, times[rank][i - 1].begin_ns);
    forwards += ranks[rank].done(ActionKind::Forward);
    for (const Instruction& each : programs[rank].instructions)
      transfers += each.kind == Instruction::Kind::Await;
  }
  std::size_t expected = 0;
  for (const schedule::Chain& chain : lowered.stages().chains())
    expected += static_cast<std::size_t>(chain.stages * chain.microbatches);
  EXPECT_EQ(forwards, expected);
  EXPECT_EQ(wires.sent(), transfers);
}

PipelineShape shape_of(ScheduleKind kind, int ranks, int microbatches) {
  return {.ranks = ranks,
          .stages_per_rank = schedule::required_stages_per_rank(kind).value_or(3),
          .microbatches = microbatches,
          .group_size = {}};
}

TEST(Program, EverySchedulesActionsFindTheirData) {
  for (const ScheduleKind kind : schedule::all_schedule_kinds())
    for (const int ranks : {1, 2, 4})
      for (const int post_ahead : {0, 1, 2, 100}) {
        if (kind == ScheduleKind::DualPipe && ranks == 1) continue;
        SCOPED_TRACE(std::string(schedule::to_text(kind)) + " on " + std::to_string(ranks) + ", ahead " +
                     std::to_string(post_ahead));
        const Schedule lowered = executable(schedule::generate(kind, shape_of(kind, ranks, 2 * ranks)));
        execute_everywhere(lowered, {}, {.has_backward = true, .post_ahead = post_ahead});
        execute_everywhere(forward_only(lowered), {}, {.has_backward = false, .post_ahead = post_ahead});
      }
}

TEST(Program, SkipConnectionsInEverySchedule) {
  for (const ScheduleKind kind : schedule::all_schedule_kinds()) {
    SCOPED_TRACE(schedule::to_text(kind));
    const Schedule lowered = executable(schedule::generate(kind, shape_of(kind, 4, 8)));
    std::vector<SkipConnection> skips;
    for (const schedule::Chain& chain : lowered.stages().chains()) {
      skips.push_back({chain.first_stage, chain.first_stage + chain.stages - 1});
      skips.push_back({chain.first_stage + 1, chain.first_stage + chain.stages - 1});
      skips.push_back({chain.first_stage, chain.first_stage + 2});
    }
    execute_everywhere(lowered, skips, {});
    execute_everywhere(forward_only(lowered), skips, {.has_backward = false});
  }
}

TEST(Program, ReceivesAreDeferredAsTheUserWroteThem) {
  const Schedule compute =
      schedule::generate(ScheduleKind::Interleaved1F1B, shape_of(ScheduleKind::Interleaved1F1B, 4, 8));
  execute_everywhere(executable(schedule::lower(compute, {.defer_receives = true, .unshard = false})), {},
                     {});
}

// On one rank a lowered schedule has no transfers; it is executed unchanged.
TEST(Program, ALoweredScheduleOfOneRankIsNotLoweredAgain) {
  const Schedule lowered = schedule::lower(schedule::generate(
      ScheduleKind::OneFOneB, {.ranks = 1, .stages_per_rank = 1, .microbatches = 3, .group_size = {}}));
  EXPECT_EQ(executable(lowered, false), lowered);
  EXPECT_EQ(executable(lowered, true), lowered);
}

TEST(Program, PostsComeEarlierAndKeepTheirOrder) {
  const Schedule lowered = executable(schedule::generate(
      ScheduleKind::OneFOneB, {.ranks = 2, .stages_per_rank = 1, .microbatches = 4, .group_size = {}}));
  const auto posts_before_first_compute = [&](int ahead) {
    int posts = 0;
    for (const Instruction& each : compile_program(lowered, 1, {}, {.post_ahead = ahead}).instructions) {
      if (each.kind == Instruction::Kind::Compute) break;
      posts += each.kind == Instruction::Kind::Post;
    }
    return posts;
  };
  EXPECT_EQ(posts_before_first_compute(0), 1);
  EXPECT_GT(posts_before_first_compute(2), 1);
  EXPECT_EQ(posts_before_first_compute(100), 4);
}

TEST(Program, OverlapsAreUnits) {
  const Schedule lowered = executable(schedule::generate(
      ScheduleKind::DualPipeV, {.ranks = 2, .stages_per_rank = 2, .microbatches = 6, .group_size = {}}));
  int units = 0;
  const Program program = compile_program(lowered, 0);
  for (std::size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& each = program.instructions[i];
    if (each.kind != Instruction::Kind::Compute || each.members < 2) continue;
    ++units;
    for (int k = 1; k < each.members; ++k) {
      EXPECT_EQ(program.instructions[i + static_cast<std::size_t>(k)].kind, Instruction::Kind::Compute);
      EXPECT_EQ(program.instructions[i + static_cast<std::size_t>(k)].members, 0);
    }
  }
  EXPECT_GT(units, 0);
}

TEST(Program, Text) {
  const Schedule lowered = executable(schedule::generate(
      ScheduleKind::OneFOneB, {.ranks = 2, .stages_per_rank = 1, .microbatches = 2, .group_size = {}}));
  const Program program = compile_program(lowered, 1, {{0, 1}});
  std::string all;
  for (const Instruction& each : program.instructions) all += to_text(program, each) + "\n";
  EXPECT_TRUE(test::has_text(all, "await 1RECV_F0 (activation of stage 0 to stage 1)"));
  EXPECT_TRUE(test::has_text(all, "post 1RECV_F1 (skip 0: activation of stage 0 to stage 1)"));
  EXPECT_TRUE(test::has_text(all, "send 1SEND_B0 (gradient of stage 1 to stage 0)"));
  EXPECT_TRUE(test::has_text(all, "compute 1B1"));
}

TEST(Program, BadInput) {
  const Schedule lowered = executable(schedule::generate(
      ScheduleKind::OneFOneB, {.ranks = 2, .stages_per_rank = 1, .microbatches = 2, .group_size = {}}));
  EXPECT_THROW(compile_program(lowered, 2), ValueError);
  EXPECT_THROW(compile_program(lowered, -1), ValueError);
  EXPECT_THROW(compile_program(lowered, 0, {{1, 0}}), ValueError);
  EXPECT_THROW(compile_program(lowered, 0, {{0, 0}}), ValueError);
  EXPECT_THROW(compile_program(lowered, 0, {{0, 2}}), ValueError);
  EXPECT_THROW(compile_program(lowered, 0, {}, {.post_ahead = -1}), ValueError);
  EXPECT_THROW(executable(schedule::parse_schedule("0F0,0B0\n1F0\n")), schedule::ScheduleError);
  const Schedule two_chains = executable(schedule::generate(
      ScheduleKind::DualPipe, {.ranks = 2, .stages_per_rank = 2, .microbatches = 4, .group_size = {}}));
  EXPECT_THROW(compile_program(two_chains, 0, {{0, 3}}), ValueError);
}

// An action that fails leaves its place in `progress`.
TEST(Program, AFailureLeavesItsPlace) {
  struct Failing final : StepActions {
    void compute(std::span<const Instruction>) override { throw ValueError("no"); }
    void post(const Instruction&, const Channel&) override {}
    void await(const Instruction&, const Channel&) override {}
    void send(const Instruction&, const Channel&) override {}
    void pass(const Instruction&, const Channel&) override {}
    void stage_wide(const Instruction&) override {}
    void finish() override {}
  } actions;
  const Schedule lowered = executable(schedule::generate(
      ScheduleKind::GPipe, {.ranks = 2, .stages_per_rank = 1, .microbatches = 2, .group_size = {}}));
  const Program program = compile_program(lowered, 0);
  StepProgress progress;
  EXPECT_THROW(execute(program, actions, progress), ValueError);
  const auto at = progress.read().instruction;
  ASSERT_GE(at, 0);
  EXPECT_EQ(schedule::to_text(program.instructions[static_cast<std::size_t>(at)].action), "0F0");
}

}  // namespace program_test
}  // namespace penstock
