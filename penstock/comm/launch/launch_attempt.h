// One attempt of a launch: starts all ranks, watches them and ends them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/comm/launch/launch_output.h"
#include "penstock/comm/launch/launch_process.h"
#include "penstock/comm/launch/launch_signals.h"
#include "penstock/comm/launch/launcher.h"

namespace penstock::comm {

class NodeSession;

// State shared by the attempts of one launch.
struct LaunchContext {
  const LaunchOptions& options;
  std::string program_path;
  std::string launch_id;
  std::string secret;  // for ranks that have no PENSTOCK_SECRET; empty: not all ranks would get the same one
  int threads = 1;
  LaunchSignals& signals;
  OrphanGuard& guard;
  Terminal& terminal;
  NodeSession* nodes = nullptr;  // of a launch over several hosts
};

// Which ranks an attempt starts on this host.
struct AttemptPlan {
  int attempt = 0;
  int ranks = 0;  // on this host
  int first_rank = 0;
  int world_size = 0;
  int node = 0, nodes = 1;
  std::string master = "127.0.0.1";
  int port = 0;
};

struct AttemptResult {
  std::vector<RankOutcome> ranks;        // empty if the program could not be executed
  std::optional<int> first_failed_rank;  // of this host
  bool failed_elsewhere = false;         // a rank of another host failed first, or a host was lost
  bool hub_lost = false;                 // the launcher of node 0 is gone
  int stopped_by = 0;
  int start_code = 0;  // 126 or 127 if the program could not be executed, else 0
  std::string error;
};

// Writes a line of the launcher itself to standard error.
void print_launcher_line(Terminal& terminal, const std::string& text);

// Returns when every rank has ended, its process group is gone and its output has been read. Throws like
// `launch`; nothing is left running in that case either.
AttemptResult run_attempt(const LaunchContext& context, const AttemptPlan& plan);

// Returns the environment of one rank: the launching process's, then options.environment, then the launcher's
// variables.
// `notices`: where the ranks read which of them have ended (launch_notices.h).
std::vector<std::string> rank_environment(const LaunchContext& context, const AttemptPlan& plan,
                                          int local_rank, const std::string& notices);

// Returns a TCP port on which nobody listens. Chosen below the range the kernel uses for outgoing
// connections, so that none of those takes it before rank 0 listens.
int free_port();
bool port_is_free(int port);

// "SIGTERM"; "signal 64" for a signal without a name.
std::string signal_name(int signal);

}  // namespace penstock::comm
