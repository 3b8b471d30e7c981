// Starts the ranks of one job on this host, shows their output, and ends all of them when one fails.
//
//   LaunchOptions options;
//   options.ranks = 4;
//   options.command = {"./train", "--steps", "100"};
//   const LaunchResult result = launch(options);
//   return result.exit_code;
//
// What a rank finds in its environment:
//   RANK, LOCAL_RANK              0 .. ranks-1
//   WORLD_SIZE, LOCAL_WORLD_SIZE  ranks
//   MASTER_ADDR, MASTER_PORT      127.0.0.1 and a port that was free when the attempt began
//   PENSTOCK_RESTART_COUNT        0 in the first attempt
//   PENSTOCK_LAUNCH_ID            one value per launch; identifies processes that left their group, so that they can be ended
//   OMP_NUM_THREADS and others    threads (cores / ranks) and memory, unless already set: compute_environment.h
// Its standard input is /dev/null, it leads a process group of its own, and no signal is blocked or caught.
//
// Nothing outlives a launch. A rank's process group is killed when the rank ends; what left the group is
// found by its environment and killed when the attempt ends; if the launching process itself is killed, the
// kernel kills the ranks and a small guard process kills their groups. Only a process that both leaves its
// group and clears its environment (or, after a `kill -9` of the launcher, one that merely leaves its group)
// can escape.
//
// Thread rule: any thread may call `launch`, one at a time in a process; it blocks until everything has
// ended. The process may have other threads. While it runs, SIGINT, SIGTERM, SIGHUP and SIGCHLD are handled
// by the launcher; handlers and the caller's signal mask are put back before it returns.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace penstock::comm {

inline constexpr int kMaxLocalRanks = 1024;
inline constexpr std::size_t kMaxShownLine = 64 * 1024;  // bytes; a longer line is shown as several

struct LaunchOptions {
  int ranks = 0;                     // 1 .. kMaxLocalRanks
  std::vector<std::string> command;  // program and arguments; a program without '/' is looked up in PATH

  // Set in every rank on top of the caller's environment. What says who a rank is cannot be replaced.
  std::vector<std::pair<std::string, std::string>> environment;

  int restarts = 0;  // further attempts after a failed one; none follows a stop by a signal
  std::vector<int> final_exit_codes;  // a rank that fails with one of these says that another attempt would end alike: none is made
  int port = 0;      // MASTER_PORT; 0: a free one, picked anew for every attempt

  // After the first failure the other ranks have `grace` to end on their own (they notice the loss themselves
  // and print what they were doing); then SIGTERM, and SIGKILL after `kill_after`. After a stop by a signal,
  // which is passed on at once, SIGKILL follows when `stop_grace` has passed (default: `grace`): ranks that save their state before they
  // end need longer for that than for noticing that another is gone.
  std::chrono::milliseconds grace{10'000};
  std::optional<std::chrono::milliseconds> stop_grace;
  std::chrono::milliseconds kill_after{3'000};

  // <log_dir>/attempt<k>/rank<r>.log gets what rank r wrote to both streams, without prefix. Empty: no files.
  std::string log_dir;

  // Asked when a rank has failed first: whether the caller knows why and will tell. Then the launcher adds nothing of its
  // own about the failure, and starts no further attempt, which would fail alike. Empty: never.
  std::function<bool(int rank)> explained;

  enum class Color { Auto, Always, Never };
  bool prefix = true;         // "[rank r] " in front of every line
  Color color = Color::Auto;  // Auto: colour the prefix on a terminal, unless NO_COLOR is set or TERM is dumb
  int out_fd = 1;             // where the ranks' standard output goes
  int err_fd = 2;             // where their standard error and the launcher's own lines go
};

// How one rank ended.
struct RankOutcome {
  int rank = 0;
  pid_t pid = -1;
  int exit_code = -1;  // of a rank that exited; -1 otherwise
  int signal = 0;      // that killed it; 0 otherwise
  bool core_dumped = false;
  int sent_signal = 0;   // the last one the launcher sent it; 0: none, it ended on its own
  double elapsed_s = 0;  // from its start to its end

  bool ok() const { return exit_code == 0; }
  // As a shell reports it: the exit code, or 128 + signal. 1 when other code of the process took the status.
  int code() const;
  // "exit code 3", "killed by SIGTERM (sent by the launcher)".
  std::string describe() const;
};

struct LaunchResult {
  int exit_code = 0;                     // 0: every rank of the last attempt exited with 0
  std::optional<int> first_failed_rank;  // of the last attempt
  std::vector<RankOutcome> ranks;        // of the last attempt, by rank; empty when nothing could be started
  int attempts = 0;                      // attempts begun
  int stopped_by = 0;  // SIGINT, SIGTERM or SIGHUP that was passed on; SIGPIPE: nobody reads our output
  std::string error;   // why the program could not be started (exit code 126 or 127); else empty
};

// Runs the job to its end. The exit code is that of the rank that failed first, in the last attempt; 127 when
// the program does not exist and 126 when it cannot be executed, with the reason on `err_fd`; 141 when the
// reader of `out_fd` or `err_fd` went away. Throws ConfigError for bad options or an unusable log folder or
// port, StateError when this process is already launching or the system refuses more processes or files.
// Nothing is left running in any case.
LaunchResult launch(const LaunchOptions& options);

}  // namespace penstock::comm
