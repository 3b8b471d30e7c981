// Where every rank of a pipeline was when a wait went on for too long, and whose fault it is.
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
// Each rank tells its own place (step_watch.h); who waits for whom is then a graph, and what is wrong with the step is a cycle in it or
// the rank in which its paths end. Ranks are global ranks of the world. Knows nothing of Torch. Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/program/program.h"

namespace penstock::pipeline {

// What one rank is doing.
struct RankPlace {
  enum class State : std::uint8_t {
    NoWord,     // nothing was heard of it: stopped, or cut off
    Lost,       // it is gone; the rest is what it said last
    Between,    // not in a step
    Agreeing,   // on the step, with all other ranks; the trial runs of stages count as part of it
    Computing,  // in a module, or anything else that needs nobody
    Waiting,    // for data
    Finishing,  // waits until what it sent has been received
  };
  State state = State::NoWord;
  int rank = 0;
  std::uint64_t step = 0;         // counted from 1; 0 before the first one
  double for_s = 0;               // in this place, at the time of the word
  double said_s_ago = 0;          // age of the word
  std::string instruction;        // "await 3RECV_F1 (activation of stage 2 to stage 3)"; empty outside of a program
  std::optional<int> stage, microbatch;
  std::string kind;               // of the action: "F", "RECV_B", ...
  std::vector<int> waits_for;     // while waiting the one rank; while finishing those it has sent to
  std::string error;              // first line of what ended its step, if something has; of NoWord why it could not be asked
  bool own_error = false;         // the error arose on that rank, it is no consequence of what another one did

  friend bool operator==(const RankPlace&, const RankPlace&) = default;
};
std::string_view to_text(RankPlace::State state);
// "step 4, for 3.1 s: await ...".
std::string to_text(const RankPlace& place);

// Out of what the executor says. `ranks` are the global ranks of the pipeline in its order. An index that the program does not have
// (it belongs to a step that has just ended) is Between.
RankPlace place_of(const StepProgress::Now& now, const Program& program, const std::vector<int>& ranks, std::int64_t now_ns);

// How a place travels, as JSON. A word that cannot be read (another build, damage) is no word.
std::string encode_place(const RankPlace& place);
std::optional<RankPlace> decode_place(std::string_view word);

// What is wrong, as far as the places tell.
struct StallCause {
  enum class Kind : std::uint8_t {
    Unknown,    // no cycle and nobody who is waited for
    LostRank,
    Failure,    // a rank whose step ended by an error of its own
    Cycle,      // ranks that wait for each other
    SilentRank,
    BusyRank,   // computes, while others wait for it
    AbsentRank, // is not in the step that the others are in
  };
  Kind kind = Kind::Unknown;
  std::vector<int> ranks;   // of a cycle in the order of waiting: each waits for the next, the last for the first
  std::vector<int> held_up; // who waits for them, directly or through others; ascending
};
std::string_view to_text(StallCause::Kind kind);

// A rank that agrees waits for all that have not come to its step; one that finishes for receivers that are still in it.
StallCause find_cause(const std::vector<RankPlace>& places);

struct StallReport {
  int seen_from = 0;
  std::vector<RankPlace> places;  // in the order of the pipeline
  StallCause cause;

  std::string text() const;
  // Keys: seen_from, cause.{kind, ranks, held_up, text}, ranks[].{rank, state, step, for_s, said_s_ago, instruction, stage,
  // microbatch, kind, waits_for, error, own_error}.
  std::string to_json() const;
};
StallReport make_stall_report(int seen_from, std::vector<RankPlace> places);

}  // namespace penstock::pipeline
