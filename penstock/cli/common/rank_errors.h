// What ranks that a command has started say when they refuse to run: once, not once a rank.
//
//   RankErrors errors;                          // in the command
//   errors.listen(options);
//   const int code = comm::launch(options).exit_code;
//   errors.print();
//
//   return tell_parent([&] { ...; return 0; }); // in each rank
//
// A configuration or checkpoint that does not fit is noticed by all ranks alike. They leave the message to the command that started
// them, which prints each message once, and the launcher then adds nothing about who failed first. All other errors are printed
// by the rank that has them, at once.
#pragma once

#include <functional>

#include "penstock/cli/common/work_folder.h"
#include "penstock/comm/launch/launcher.h"

namespace penstock::cli {

class RankErrors {
 public:
  RankErrors() : folder_("errors") {}
  void listen(comm::LaunchOptions& options) const;
  // To standard error. After the launch.
  void print() const;

 private:
  WorkFolder folder_;
};

// Runs `body` and returns its exit code. For a ConfigError the exit code is 2, for a CheckpointError 1; both are thrown on where
// nobody listens.
int tell_parent(const std::function<int()>& body);

}  // namespace penstock::cli
