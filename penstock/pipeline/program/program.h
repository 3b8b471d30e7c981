// The program of one rank: what it does in a step, instruction by instruction. Compiled once from a lowered
// schedule, executed every step.
//
//   Program program = compile_program(lowered, rank, skips);
//   for (const Instruction& each : program.instructions) ...           // executor.h does that
//
// A schedule says when data is received and sent. A program adds when a receive is posted (ahead of its place
// in the row, so that the data travels while the rank computes), when the rank waits for it (just before the
// action that needs it), when data is handed over between two stages of one rank, and where skip connections
// are sent. Posting and sending never block, so a rank waits only in Await instructions and at the end of the
// step.
//
// A channel is a stream of microbatches between two stages: activations to the next stage, gradients to the
// previous one, and one of each kind for each skip connection. Receives of a channel are posted in the order
// in which its sender sends, as required by transports without tags.
//
// Does not depend on Torch. Plain values; immutable once compiled.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/schedule.h"

namespace penstock {

// A tensor that a stage sends directly to a later one, past the stages between them.
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
  int skip = -1;  // index of the skip connection; -1: between neighbouring stages
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
  schedule::Action action;    // for a transfer the compute action that produces or needs the data
  std::int32_t channel = -1;  // for Post, Await, Send and Pass
  std::int32_t members = 1;   // for Compute: size of the unit at its first instruction, 0 at the others
  friend bool operator==(const Instruction&, const Instruction&) = default;
};
std::string_view to_text(Instruction::Kind kind);

struct Program {
  int rank = 0;
  bool has_backward = true;
  std::vector<Channel> channels;  // channels that begin or end on this rank
  std::vector<Instruction> instructions;

  // Returns the index of the channel, or -1 if there is none.
  int find_channel(Channel::Kind kind, int from_stage, int to_stage, int skip = -1) const;
};
// "await 3F1 (activation of stage 2 to stage 3)".
std::string to_text(const Program& program, const Instruction& instruction);

struct ProgramOptions {
  bool has_backward = true;
  // How many compute actions ahead of its place in the row a receive is posted. Each costs a buffer.
  int post_ahead = 2;
};

// `lowered` is a schedule with transfers that `validate` accepts; compile rows without backward with
// has_backward = false. Throws ValueError for a rank or a skip connection outside the schedule, for a skip
// connection that does not lead to a later stage of its chain, and for a negative post_ahead.
Program compile_program(const schedule::Schedule& lowered, int rank,
                        const std::vector<SkipConnection>& skips = {}, const ProgramOptions& options = {});

// Returns the forward part of a schedule, lowered, as evaluation runs it. Accepts compute-only and lowered
// schedules.
schedule::Schedule forward_only(const schedule::Schedule& schedule);

// Returns a schedule that is ready for execution: validates and lowers a compute-only one, only validates a
// lowered one. Throws ScheduleError.
schedule::Schedule executable(schedule::Schedule schedule, bool unshard = false);

}  // namespace penstock
