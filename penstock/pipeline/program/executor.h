// The loop that executes a pipeline program, instruction by instruction, for any schedule.
//
// A StepActions defines what the instructions do; the loop takes care of order, timing and progress. It
// publishes which instruction is being executed and since when, for observers (stall_report.h), and keeps the
// times of all instructions for the trace.
//
// Does not depend on Torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "penstock/pipeline/program/program.h"

namespace penstock {

// A part of one member of an overlapped unit. The members of a unit take turns: one of them computes at any
// time, others may be in an exchange with other ranks.
struct UnitPiece {
  enum class Kind : std::uint8_t {
    Compute,   // a block of its stage, or what is between two exchanges
    Exchange,  // from the start of a collective until its result is there
  };
  int member = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  Kind kind = Kind::Compute;
  friend bool operator==(const UnitPiece&, const UnitPiece&) = default;
};

class StepActions {
 public:
  virtual ~StepActions() = default;
  // F, B, I or W of one microbatch; several instructions are a unit whose parts may be interleaved.
  virtual void compute(std::span<const Instruction> unit) = 0;
  // The pieces of the last unit, by their beginnings.
  virtual std::vector<UnitPiece> pieces() const { return {}; }
  virtual void post(const Instruction& instruction, const Channel& channel) = 0;
  virtual void await(const Instruction& instruction, const Channel& channel) = 0;
  virtual void send(const Instruction& instruction, const Channel& channel) = 0;
  virtual void pass(const Instruction& instruction, const Channel& channel) = 0;
  virtual void stage_wide(const Instruction& instruction) = 0;
  // After the last instruction: waits for what was sent.
  virtual void finish() = 0;
};

// Times of one executed instruction, by the steady clock.
struct TimedInstruction {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::vector<UnitPiece> pieces = {};  // of an overlapped unit, at its first instruction
};

// The position of a rank in its step. One thread writes, any thread reads.
class StepProgress {
 public:
  struct Now {
    std::uint64_t step = 0;            // steps begun so far
    std::int64_t instruction = kNone;  // index into the program
    std::int64_t since_ns = 0;         // steady clock
  };
  static constexpr std::int64_t kNone = -1;       // between steps
  static constexpr std::int64_t kFinishing = -2;  // waiting for what was sent
  static constexpr std::int64_t kAgreeing = -3;   // agreeing with the other ranks on the step
  static constexpr std::int64_t kInferring = -4;  // inferring shapes

  Now read() const;
  void begin_step();
  void enter(std::int64_t instruction, std::int64_t now_ns);

 private:
  // Sequence lock: the version is odd while the other fields change.
  std::atomic<std::uint64_t> version_ = 0;
  std::atomic<std::uint64_t> step_ = 0;
  std::atomic<std::int64_t> instruction_ = kNone;
  std::atomic<std::int64_t> since_ns_ = 0;
};

// Monotonic, the same for all threads.
std::int64_t steady_now_ns();

// Executes the program once. `times`, if given, gets one entry per instruction and one for the end. An
// exception of an action propagates and leaves `progress` where it happened. `after`, if given, is called
// after each instruction; its time is not counted in any instruction.
void execute(const Program& program, StepActions& actions, StepProgress& progress,
             std::vector<TimedInstruction>* times = nullptr, const std::function<void()>& after = {});

}  // namespace penstock
