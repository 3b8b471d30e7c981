// Reports where every rank of a pipeline was when a wait took too long, and which rank is the cause.
//
//   StallReport report = make_stall_report(own_rank, places);
//   log().error("{}", report.text());
//
//   pipeline stalled, seen from rank 0
//     rank 0  step 4, for 3.1 s: await 0RECV_B0 (gradient of stage 1 to stage 0), waits for rank 1
//     rank 1  step 4, for 3.4 s: compute 1F2
//     rank 2  step 4, for 3.2 s: await 2RECV_F2 (activation of stage 1 to stage 2), waits for rank 1
//   rank 1 is busy and holds up ranks 0, 2: step 4, for 3.4 s: compute 1F2
//
// Each rank reports its own place (step_watch.h). Who waits for whom is then a graph, and the cause of the
// stall is a cycle in it or the rank where its paths end. Ranks are global ranks of the world. Does not
// depend on Torch. Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/program/program.h"

namespace penstock {

// What one rank is doing.
struct RankPlace {
  enum class State : std::uint8_t {
    NoStatus,   // no status received: stopped, or cut off
    Lost,       // the process is gone; the other fields are its last status
    Between,    // not in a step
    Agreeing,   // agreeing on the step with all other ranks; includes the trial runs of stages
    Computing,  // in a module, or anything else that needs no other rank
    Waiting,    // waiting for data
    Finishing,  // waiting until what it sent has been received
  };
  State state = State::NoStatus;
  int rank = 0;
  std::uint64_t step = 0;   // counted from 1; 0 before the first step
  double for_s = 0;         // time in this place, when the status was posted
  double said_s_ago = 0;    // age of the status
  std::string instruction;  // "await 3RECV_F1 (activation of stage 2 to stage 3)"; empty outside of a program
  std::optional<int> stage, microbatch;
  std::string kind;            // of the action: "F", "RECV_B", ...
  std::vector<int> waits_for;  // Waiting: the one rank; Finishing: the ranks it has sent to
  std::string error;           // first line of what ended its step; for NoStatus why it could not be asked
  bool own_error = false;      // the error arose on that rank, not as a consequence of another failure

  friend bool operator==(const RankPlace&, const RankPlace&) = default;
};
std::string_view to_text(RankPlace::State state);
// "step 4, for 3.1 s: await ...".
std::string to_text(const RankPlace& place);

// Derives the place from the progress of the executor. `ranks` are the global ranks of the pipeline, in
// pipeline order. An instruction index outside the program (it belongs to a step that has just ended) is
// Between.
RankPlace place_of(const StepProgress::Now& now, const Program& program, const std::vector<int>& ranks,
                   std::int64_t now_ns);

// A place as JSON text. decode_place returns std::nullopt for text that it cannot read (another build,
// damage).
std::string encode_place(const RankPlace& place);
std::optional<RankPlace> decode_place(std::string_view text);

// The cause of a stall, as far as the places show it.
struct StallCause {
  enum class Kind : std::uint8_t {
    Unknown,  // no cycle and no rank that others wait for
    LostRank,
    Failure,  // a rank whose step ended with an error of its own
    Cycle,    // ranks that wait for each other
    SilentRank,
    BusyRank,    // computes, while others wait for it
    AbsentRank,  // is not in the step that the others are in
  };
  Kind kind = Kind::Unknown;
  std::vector<int> ranks;    // of a cycle in waiting order: each waits for the next, the last for the first
  std::vector<int> held_up;  // ranks that wait for them, directly or through others; ascending
};
std::string_view to_text(StallCause::Kind kind);

// A rank that is Agreeing waits for all ranks that have not reached its step; one that is Finishing waits for
// receivers still in the step.
StallCause find_cause(const std::vector<RankPlace>& places);

struct StallReport {
  int seen_from = 0;
  std::vector<RankPlace> places;  // in the order of the pipeline
  StallCause cause;

  std::string text() const;
  // Keys: seen_from, cause.{kind, ranks, held_up, text}, ranks[].{rank, state, step, for_s, said_s_ago,
  // instruction, stage, microbatch, kind, waits_for, error, own_error}.
  std::string to_json() const;
};
StallReport make_stall_report(int seen_from, std::vector<RankPlace> places);

}  // namespace penstock
