// Decides whether a trial ended in one of the two right ways: with the losses of an undisturbed run, bit for
// bit, or with an error that names the culprit within the deadline; and in both cases with nothing left
// running, no temporary file and no checkpoint lost.
//
// A function of what was observed, without access to processes or files, so that tests can feed it wrong
// outcomes.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "tests/chaos/plan.h"

namespace penstock::chaos {

// One command of a job, a launcher or a rank.
struct CommandEnd {
  static constexpr int kStillRunning = -1;

  std::string name;    // for messages: "the launcher", "rank 0"
  int rank = -1;       // -1: a launcher
  bool hit = false;    // the fault hit this process itself; how it ends says nothing
  int exit_code = 0;   // 128 + signal if it was killed by one
  double seconds = 0;  // after the fault, or after the start of a start without one
  std::string output;  // what it wrote from the fault on; earlier lines cannot be about it
};

// Losses by step.
using Losses = std::map<int, double>;

struct Outcome {
  bool struck = false;                      // the fault began before the start that it strikes was over
  std::vector<CommandEnd> first;            // the start that the fault strikes
  std::vector<CommandEnd> second;           // the start after it; empty if the first one finished
  Losses losses;                            // of both together
  std::vector<std::string> left_processes;  // after the first start, and after the second
  std::vector<std::string> left_memory;     // files in /dev/shm
  std::vector<std::string> left_temporary;  // files in TMPDIR, and half-written checkpoints
  std::vector<std::string>
      lost_checkpoints;       // complete before the fault or the second start; gone or changed
  int newest_checkpoint = 0;  // step of the newest intact one before the second start
  int continued_after = 0;    // step after which the second start continued
};

enum class End { SameLosses, NamedError, Wrong };

struct Verdict {
  End end = End::Wrong;
  std::vector<std::string> problems;  // sentences; not empty if and only if `end` is Wrong
};

// `undisturbed`: the losses of a run of at least `steps` steps; the first `steps` of them are expected.
Verdict judge(const Outcome& outcome, const Expectation& expected, const Losses& undisturbed, int steps);

// The lines that can name a culprit: without the prefixes of launchers and without their summaries, which
// list every rank. `own_rank`: that of the command, -1 for a launcher; a rank does not name itself.
bool names_one_of(const std::string& output, const std::vector<std::string>& culprits, int own_rank);

}  // namespace penstock::chaos
