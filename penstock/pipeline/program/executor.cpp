#include "penstock/pipeline/program/executor.h"

#include <chrono>

namespace penstock {

StepProgress::Now StepProgress::read() const {
  for (;;) {
    const std::uint64_t before = version_.load(std::memory_order_acquire);
    const Now now{step_.load(std::memory_order_acquire), instruction_.load(std::memory_order_acquire),
                  since_ns_.load(std::memory_order_acquire)};
    if (before % 2 == 0 && version_.load(std::memory_order_acquire) == before) return now;
  }
}

void StepProgress::begin_step() { step_.fetch_add(1, std::memory_order_release); }

void StepProgress::enter(std::int64_t instruction, std::int64_t now_ns) {
  version_.fetch_add(1, std::memory_order_acq_rel);
  instruction_.store(instruction, std::memory_order_release);
  since_ns_.store(now_ns, std::memory_order_release);
  version_.fetch_add(1, std::memory_order_acq_rel);
}

std::int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void execute(const Program& program, StepActions& actions, StepProgress& progress,
             std::vector<TimedInstruction>* times, const std::function<void()>& after) {
  const auto& instructions = program.instructions;
  if (times != nullptr) times->assign(instructions.size() + 1, {});
  std::int64_t now = steady_now_ns();
  for (std::size_t i = 0; i < instructions.size();) {
    const Instruction& each = instructions[i];
    progress.enter(static_cast<std::int64_t>(i), now);
    std::size_t length = 1;
    const auto channel = [&]() -> const Channel& {
      return program.channels[static_cast<std::size_t>(each.channel)];
    };
    switch (each.kind) {
      case Instruction::Kind::Compute:
        length = static_cast<std::size_t>(each.members);
        actions.compute({&each, length});
        break;
      case Instruction::Kind::Post:
        actions.post(each, channel());
        break;
      case Instruction::Kind::Await:
        actions.await(each, channel());
        break;
      case Instruction::Kind::Send:
        actions.send(each, channel());
        break;
      case Instruction::Kind::Pass:
        actions.pass(each, channel());
        break;
      case Instruction::Kind::Stage:
        actions.stage_wide(each);
        break;
    }
    const std::int64_t end = steady_now_ns();
    if (times != nullptr) {
      for (std::size_t member = 0; member < length; ++member) (*times)[i + member] = {now, end};
      if (length > 1) (*times)[i].pieces = actions.pieces();
    }
    now = end;
    if (after) {
      after();
      now = steady_now_ns();
    }
    i += length;
  }
  progress.enter(StepProgress::kFinishing, now);
  actions.finish();
  const std::int64_t end = steady_now_ns();
  if (times != nullptr) times->back() = {now, end};
  progress.enter(StepProgress::kNone, end);
}

}  // namespace penstock
