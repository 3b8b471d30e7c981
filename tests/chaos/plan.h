// What happens in a trial: a pure function of the fault and the seed, so that a trial can be repeated.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::chaos {

enum class Fault {
  KillRank,
  StopRank,
  PauseRank,
  KillLauncher,
  PauseLauncher,
  KillHost,
  StopHost,
  Delay,
  Loss,
  Reorder,
  Rate,
  CablePulled,
  CableCut,
  DiskFull,
  DiskReadOnly,
  DiskSlow,
  CheckpointDamaged,
  ClockJump,
  Garbage,
  Flood,
  HalfOpen,
};

const std::vector<Fault>& all_faults();
const char* name_of(Fault fault);     // "kill-rank"
const char* meaning_of(Fault fault);  // for the table
std::optional<Fault> fault_named(std::string_view name);

// Who starts the two ranks.
enum class Start {
  Train,   // penstock train, which starts its own ranks
  Launch,  // penstock launch -n 2 -- penstock train
  Hosts,   // penstock train on each of two hosts, with RANK, WORLD_SIZE and MASTER_ADDR
};

// Over which axis the two ranks share the work.
enum class Layout { Pipeline, Replicas };

// How the checkpoint is damaged.
enum class Damage { FlippedByte, Truncated, MissingFile, EmptyFile };

struct Plan {
  Fault fault{};
  std::uint64_t seed = 0;
  Start start = Start::Train;
  Layout layout = Layout::Pipeline;
  int steps = 0;
  int restarts = 0;
  // When the fault begins: that long after the start, or as soon as this step is in metrics.jsonl.
  std::optional<std::chrono::milliseconds> strike_after;
  int strike_step = 0;
  int victim = 0;                 // a rank; with Start::Hosts also the host of that number
  double seconds = 0;             // how long the fault lasts; 0: to the end of the start it strikes
  double amount = 0;              // in the unit that to_text prints
  bool fallback = true;           // checkpoint.fallback
  Damage damage{};                // of CheckpointDamaged
  bool by_other_program = false;  // rate by tc instead of the relay, loss by nft, a cable without carrier
};

// Whether strangers connect to the ports of the job.
bool has_strangers(Fault fault);

// Steps of the longest trial.
int longest_run();

// The deadline of a rank for the others (launch.timeout_s), which the trial gives to the job.
double timeout_s(const Plan& plan);

// How a trial has to end.
struct Expectation {
  // The start that the fault strikes must reach the end. Otherwise an error that names the culprit is right,
  // too.
  bool must_finish = false;
  // The start that the fault strikes must fail, and say why: the fault does not end by itself.
  bool must_fail = false;
  // Nobody is left who could name a culprit: the start ends silently.
  bool silent = false;
  // Of these texts one must be in the errors of each command that failed and that the fault did not hit
  // itself.
  std::vector<std::string> culprits;
  // One command that names it is enough: rank 0 reports for all ranks what all of them know.
  bool one_names_for_all = false;
  // One of these must be said even by a start that finishes.
  std::vector<std::string> reports;
  // Seconds after the fault by which every command has ended that it did not hit itself.
  double deadline_s = 0;
  // SIGKILL of the process that would remove its temporary files.
  bool may_leave_temporary_files = false;
};

Plan plan_of(Fault fault, std::uint64_t seed);
Expectation expectation_of(const Plan& plan);

// The other host, or rank.
inline int other_than(int victim) { return 1 - victim; }

// One line: "kill-rank of seed 3: rank 1 after step 12; penstock train, pipeline, 1 restart".
std::string to_text(const Plan& plan);

}  // namespace penstock::chaos
