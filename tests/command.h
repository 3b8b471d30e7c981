// Runs a program from a shell command, with a timeout.
#pragma once

#include <chrono>
#include <cstdlib>
#include <string>

namespace penstock::test {

struct Ended {
  int exit_code = -1;  // 128 + signal if killed by one; kTimedOut
  double seconds = 0;
  std::string output;  // both streams

  static constexpr int kTimedOut = -2;
};

// Runs a shell command in a process group of its own; kills the group after `limit`.
Ended run_command(const std::string& command, std::chrono::seconds limit = std::chrono::seconds(60));

// An environment variable, empty if not set.
std::string environment(const char* name);

}  // namespace penstock::test
