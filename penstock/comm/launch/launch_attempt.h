// One attempt of a launch: all ranks started, watched and ended.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/comm/launch/launch_output.h"
#include "penstock/comm/launch/launch_process.h"
#include "penstock/comm/launch/launch_signals.h"
#include "penstock/comm/launch/launcher.h"

namespace penstock::comm {

// What the attempts of one launch share.
struct LaunchContext {
  const LaunchOptions& options;
  std::string program_path;
  std::string launch_id;
  int threads = 1;
  LaunchSignals& signals;
  OrphanGuard& guard;
  Terminal& terminal;
};

struct AttemptResult {
  std::vector<RankOutcome> ranks;  // empty when the program could not be executed
  std::optional<int> first_failed_rank;
  int stopped_by = 0;
  int start_code = 0;  // 126 or 127 when the program could not be executed, else 0
  std::string error;
};

// The launcher's own line on standard error.
void say(Terminal& terminal, const std::string& text);

// Returns when every rank has ended, its group is gone and its output has been taken. Throws as `launch`
// does; then too nothing is left running.
AttemptResult run_attempt(const LaunchContext& context, int attempt);

// The environment of one rank: the launching process's, then options.environment, then the launcher's
// variables.
std::vector<std::string> rank_environment(const LaunchContext& context, int attempt, int rank, int port);

// A TCP port nobody listens on. Searched below the range the kernel takes for outgoing connections, so that
// none of those grabs it before rank 0 listens.
int free_port();
bool port_is_free(int port);

// "SIGTERM"; "signal 64" for one without a name.
std::string signal_name(int signal);

}  // namespace penstock::comm
