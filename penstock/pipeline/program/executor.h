// The one loop that executes a pipeline: a program, whatever schedule it came from, instruction by instruction.
//
// What the instructions mean is the business of a StepActions; the loop brings order, time and visibility. It says at every moment
// which instruction is being executed and since when, for whoever watches (stall_report.h), and keeps the times of all, for the trace.
//
// Knows nothing of Torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "penstock/pipeline/program/program.h"

namespace penstock::pipeline {

// A part of one member of an overlapped unit, which the members ran in turns: a block of its stage.
struct UnitPiece {
  int member = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  friend bool operator==(const UnitPiece&, const UnitPiece&) = default;
};

class StepActions {
 public:
  virtual ~StepActions() = default;
  // F, B, I or W of one microbatch; several: a unit whose parts may be interleaved.
  virtual void compute(std::span<const Instruction> unit) = 0;
  // Of the last unit, in order of time.
  virtual std::vector<UnitPiece> pieces() const { return {}; }
  virtual void post(const Instruction& instruction, const Channel& channel) = 0;
  virtual void await(const Instruction& instruction, const Channel& channel) = 0;
  virtual void send(const Instruction& instruction, const Channel& channel) = 0;
  virtual void pass(const Instruction& instruction, const Channel& channel) = 0;
  virtual void stage_wide(const Instruction& instruction) = 0;
  // After the last instruction: waits for what was sent.
  virtual void finish() = 0;
};

// Times of one executed instruction, steady clock.
struct TimedInstruction {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::vector<UnitPiece> pieces = {};  // of an overlapped unit, at its first instruction
};

// Where a rank is. One thread writes, any thread reads.
class StepProgress {
 public:
  struct Now {
    std::uint64_t step = 0;           // steps begun so far
    std::int64_t instruction = kNone; // index into the program
    std::int64_t since_ns = 0;        // steady clock
  };
  static constexpr std::int64_t kNone = -1;       // between steps
  static constexpr std::int64_t kFinishing = -2;  // waiting for what was sent
  static constexpr std::int64_t kAgreeing = -3;   // agreeing with the other ranks on the step
  static constexpr std::int64_t kInferring = -4;  // finding out shapes

  Now read() const;
  void begin_step();
  void enter(std::int64_t instruction, std::int64_t now_ns);

 private:
  // A version around two words: odd while they change.
  std::atomic<std::uint64_t> version_ = 0;
  std::atomic<std::uint64_t> step_ = 0;
  std::atomic<std::int64_t> instruction_ = kNone;
  std::atomic<std::int64_t> since_ns_ = 0;
};

// Monotonic, the same for all threads.
std::int64_t steady_now_ns();

// Executes the program once. `times`, if given, gets one entry per instruction and one for the end. An exception of an action passes
// through and leaves `progress` where it happened. `after`, if given, is called behind each instruction; its time is in none of them.
void execute(const Program& program, StepActions& actions, StepProgress& progress, std::vector<TimedInstruction>* times = nullptr, const std::function<void()>& after = {});

}  // namespace penstock::pipeline
