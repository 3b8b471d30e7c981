// Collects the errors of ranks that a command has started, so that an error of all ranks is printed once.
//
//   RankErrors errors;                          // in the command
//   errors.listen(options);
//   const int code = comm::launch(options).exit_code;
//   errors.print();
//
//   return report_to_parent([&] { ...; return 0; }); // in each rank
//
// All ranks detect an invalid configuration or checkpoint in the same way. They pass the message to the
// command that started them, which prints each message once, and the launcher then does not report which rank
// failed first. All other errors are printed immediately by the rank that has them.
#pragma once

#include <functional>

#include "penstock/cli/common/work_folder.h"
#include "penstock/comm/launch/launcher.h"

namespace penstock::cli {

class RankErrors {
 public:
  RankErrors() : folder_("errors") {}
  void listen(comm::LaunchOptions& options) const;
  // Prints to standard error. Call it after the launch.
  void print() const;

 private:
  WorkFolder folder_;
};

// Runs `body` and returns its exit code. Returns 2 for a ConfigError and 1 for a CheckpointError; rethrows
// both if no parent listens.
int report_to_parent(const std::function<int()>& body);

}  // namespace penstock::cli
