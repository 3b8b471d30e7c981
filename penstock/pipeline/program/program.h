// What one rank does in a step, instruction by instruction. Made once from a lowered schedule; executed every step.
//
//   Program program = compile_program(lowered, rank, skips);
//   for (const Instruction& each : program.instructions) ...           // executor.h does that
//
// A schedule says when data is received and sent. A program says more: when a receive is posted (ahead of its place in the row, so
// that the data is on its way while the rank computes), when somebody waits for it (just before the action that needs it, never
// earlier), when data changes hands between two stages of one rank, and where skip connections travel. Posting and sending never
// block, so the only places where a rank waits are Await instructions and the end of the step.
//
// A channel is a stream of microbatches between two stages: activations to the next stage, gradients to the previous one, and for
// each skip connection one of either kind. Receives of a channel are posted in the order in which its sender sends, which a transport
// without tags needs.
//
// Knows nothing of Torch. Plain values; immutable once compiled.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/schedule.h"

namespace penstock::pipeline {

// A tensor that one stage hands to a later one past those between them.
struct SkipConnection {
  int from = 0;
  int to = 0;
  friend bool operator==(const SkipConnection&, const SkipConnection&) = default;
};

struct Channel {
  enum class Kind : std::uint8_t { Activation, Gradient };
  Kind kind = Kind::Activation;
  int from_stage = 0;
  int to_stage = 0;
  int skip = -1;       // number of the skip connection; -1: between neighbouring stages
  int from_rank = 0;
  int to_rank = 0;
  bool local() const { return from_rank == to_rank; }
  friend bool operator==(const Channel&, const Channel&) = default;
};
// "activation of stage 1 to stage 2", "skip 0: gradient of stage 3 to stage 1".
std::string to_text(const Channel& channel);

struct Instruction {
  enum class Kind : std::uint8_t {
    Compute,  // F, B, I or W; the first of `members` that run as one overlapped unit
    Post,     // start to receive on a channel
    Await,    // wait until it has arrived
    Send,     // start to send on a channel
    Pass,     // hand over to a stage on this rank
    Stage,    // UNSHARD, RESHARD, REDUCE_GRAD
  };
  Kind kind = Kind::Compute;
  schedule::Action action;       // the action itself; of a transfer the compute action that makes or needs the data
  std::int32_t channel = -1;     // of Post, Await, Send and Pass
  std::int32_t members = 1;      // of Compute: how many instructions, this one included, are one unit; 0 for the others of a unit
  friend bool operator==(const Instruction&, const Instruction&) = default;
};
std::string_view to_text(Instruction::Kind kind);

struct Program {
  int rank = 0;
  bool has_backward = true;
  std::vector<Channel> channels;          // those that begin or end on this rank
  std::vector<Instruction> instructions;

  // Number of the channel, -1 where there is none.
  int find_channel(Channel::Kind kind, int from_stage, int to_stage, int skip = -1) const;
};
// "await 3F1 (activation of stage 2 to stage 3)".
std::string to_text(const Program& program, const Instruction& instruction);

struct ProgramOptions {
  bool has_backward = true;
  // How many compute actions ahead of its place in the row a receive is posted. Each costs a buffer.
  int post_ahead = 2;
};

// `lowered` is a schedule with transfers that `validate` accepts; rows without backward are compiled with has_backward = false. Throws
// ValueError for a rank or a skip connection outside the schedule, for one that does not lead to a later stage of its chain, and for
// a negative post_ahead.
Program compile_program(const schedule::Schedule& lowered, int rank, const std::vector<SkipConnection>& skips = {}, const ProgramOptions& options = {});

// The forward half of a schedule, lowered: what evaluation runs. Takes compute-only and lowered schedules.
schedule::Schedule forward_only(const schedule::Schedule& schedule);

// Both schedules ready for execution: a compute-only one is validated and lowered, a lowered one validated as it stands. Throws
// ScheduleError.
schedule::Schedule executable(schedule::Schedule schedule, bool unshard = false);

}  // namespace penstock::pipeline
