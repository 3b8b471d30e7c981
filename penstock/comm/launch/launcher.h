// Starts the ranks of one job on this host, shows their output, and ends all of them when one fails. With
// LaunchOptions::nodes it is one of several launchers, one on each host, which do the same together.
//
//   LaunchOptions options;
//   options.ranks = 4;
//   options.command = {"./train", "--steps", "100"};
//   const LaunchResult result = launch(options);
//   return result.exit_code;
//
// Environment of a rank:
//   RANK, LOCAL_RANK              0 .. ranks-1
//   WORLD_SIZE, LOCAL_WORLD_SIZE  ranks
//   GROUP_RANK, GROUP_WORLD_SIZE  number of this host, and of hosts
//   MASTER_ADDR, MASTER_PORT      127.0.0.1, or the host of node 0, and a port that was free when the
//                                 attempt began
//   PENSTOCK_RESTART_COUNT        0 in the first attempt
//   PENSTOCK_SECRET               a random text of this launch, unless set (docs/security.md)
//   PENSTOCK_LAUNCH_NOTICES       where ranks that have not met yet read which of them have ended
//   PENSTOCK_LAUNCH_ID            one value per launch; identifies processes that left their group
//   OMP_NUM_THREADS and others    threads (cores / ranks) and memory, unless set: compute_environment.h
// Its standard input is /dev/null, it leads a process group of its own, and no signal is blocked or caught.
//
// No process outlives a launch. A rank's process group is killed when the rank ends. Processes that left the
// group are found by their environment and killed when the attempt ends. If the launching process itself is
// killed, the kernel kills the ranks and a small guard process kills their groups. Only a process that both
// leaves its group and clears its environment (or, after a `kill -9` of the launcher, one that merely leaves
// its group) can escape.
//
// Thread safety: any thread may call `launch`, one at a time in a process; it blocks until everything has
// ended. The process may have other threads. During the call the launcher handles SIGINT, SIGTERM, SIGHUP and
// SIGCHLD; it restores handlers and the caller's signal mask before it returns.
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

// How launchers on several hosts (nodes) find each other: each is started with the same values, except for
// `node_rank` and `hosts`. Node 0 is where rank 0 runs and where the launchers meet.
struct NodeOptions {
  int least_nodes = 1, most_nodes = 1;  // as many start as have joined in time, at least the smaller number
  std::optional<int> node_rank;  // std::nullopt: assigned; the launcher on the host of `rdzv_host` is node 0
  std::string rdzv_host;         // an address or a name of node 0's host
  int rdzv_port = 29400;
  std::chrono::milliseconds join_timeout{300'000};  // how long to wait for the smaller number of hosts
  std::chrono::milliseconds last_call{30'000};      // and then for more, up to the larger
  std::chrono::milliseconds silence{300'000};       // a host from which nothing is heard for so long is lost
  // Ranks on all hosts together, divided evenly among those that joined; 0: LaunchOptions::ranks on each
  // host.
  int world = 0;

  // On node 0 only: the names of all hosts, this one first. The launchers of the others are started by
  // `ssh HOST sh -s`, which gets a script on its standard input that executes `command_of_node`.
  std::vector<std::string> hosts;
  std::string ssh = "ssh -o BatchMode=yes";
  std::function<std::vector<std::string>(int node)> command_of_node;
};

struct LaunchOptions {
  int ranks = 0;  // on this host: 1 .. kMaxLocalRanks; ignored if NodeOptions::world is set
  std::vector<std::string> command;  // program and arguments; a program without '/' is looked up in PATH

  // Set in every rank in addition to the caller's environment. Variables that identify a rank cannot be
  // replaced.
  std::vector<std::pair<std::string, std::string>> environment;

  int restarts = 0;                   // further attempts after a failed one; none follows a stop by a signal
  std::vector<int> final_exit_codes;  // no further attempt follows a rank that fails with one of these codes
  int port = 0;                       // MASTER_PORT; 0: a free one, chosen for each attempt

  std::optional<NodeOptions> nodes;  // std::nullopt: this host alone

  // After the first failure the other ranks have `grace` to end on their own (they notice the loss themselves
  // and print what they were doing); then SIGTERM, and SIGKILL after `kill_after`. A stop signal is passed on
  // at once, and SIGKILL follows after `stop_grace` (default: `grace`): ranks that save their state before
  // they end need more time than ranks that only notice a lost peer.
  std::chrono::milliseconds grace{10'000};
  std::optional<std::chrono::milliseconds> stop_grace;
  std::chrono::milliseconds kill_after{3'000};

  // <log_dir>/attempt<k>/rank<r>.log contains what rank r wrote to both streams, without prefix. Empty: no
  // files.
  std::string log_dir;

  // Called when the first rank has failed; returns whether the caller knows the reason and will report it. If
  // so, the launcher prints nothing of its own about the failure and starts no further attempt, which would
  // fail in the same way. Empty: never.
  std::function<bool(int rank)> explained;

  enum class Color { Auto, Always, Never };
  bool prefix = true;         // "[rank r] " before every line
  Color color = Color::Auto;  // Auto: colour the prefix on a terminal, unless NO_COLOR is set or TERM is dumb
  int out_fd = 1;             // receives the ranks' standard output
  int err_fd = 2;             // receives their standard error and the launcher's own lines
};

// How one rank ended.
struct RankOutcome {
  int rank = 0;
  pid_t pid = -1;
  int exit_code = -1;  // if it exited; else -1
  int signal = 0;      // the signal that killed it; else 0
  bool core_dumped = false;
  int sent_signal = 0;   // the last one sent by the launcher; 0: none, it ended on its own
  double elapsed_s = 0;  // from its start to its end

  bool ok() const { return exit_code == 0; }
  // As a shell reports it: the exit code, or 128 + signal. 1 if other code of this process reaped the status.
  int code() const;
  // "exit code 3", "killed by SIGTERM (sent by the launcher)".
  std::string describe() const;
};

struct LaunchResult {
  int exit_code = 0;                     // 0: every rank of the last attempt exited with 0
  std::optional<int> first_failed_rank;  // of the last attempt
  std::vector<RankOutcome> ranks;        // of the last attempt, by rank; empty if nothing could be started
  int attempts = 0;                      // attempts begun
  int stopped_by = 0;  // SIGINT, SIGTERM or SIGHUP that was passed on; SIGPIPE: nobody reads the output
  std::string error;   // why the program could not be started (exit code 126 or 127); else empty
};

// Runs the job to its end. The exit code is that of the rank that failed first, on whatever host, in the last
// attempt; 1 if a host was lost; 127 if
// the program does not exist and 126 if it cannot be executed, with the reason on `err_fd`; 141 if the reader
// of `out_fd` or `err_fd` closed it. Throws ConfigError for invalid options or an unusable log folder or
// port, StateError if this process is already launching or the system refuses more processes or files.
// Nothing is left running in any case.

LaunchResult launch(const LaunchOptions& options);

}  // namespace penstock::comm
