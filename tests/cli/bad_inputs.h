// Random bad inputs for every command of `penstock`, and checks of the responses.
//
// Commands, their options and environment variables are read from the program itself: new commands and
// options are covered without being named here. Only a good command line for each command is written down
// (bad_inputs.cpp), which a case then corrupts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "tests/command.h"

namespace penstock::test {

struct CommandOption {
  std::string flag;  // "--ranks"
  bool takes_value = false;
};

struct CommandHelp {
  std::string name;  // "data make"
  std::vector<CommandOption> options;
};

// The available commands, according to --help of the program and of its commands.
std::vector<CommandHelp> all_commands(const std::string& program);
// Names of variables found in the bytes of the program: PENSTOCK_...
std::vector<std::string> own_variables(const std::string& program);

// Good files of each kind, made once by the program itself.
struct GoodFiles {
  std::filesystem::path text, config, schedule, graph, run, trace, shards;
  std::vector<std::string> keys;  // of configurations: "training.lr"
};
// Throws std::runtime_error with the program's output if one of them cannot be made.
GoodFiles make_good_files(const std::string& program, const std::filesystem::path& folder);

struct BadInput {
  std::string kind;     // what was corrupted
  std::string command;  // for the shell
};

// Returns whether a good command line for the command is known; without one it cannot be tested.
bool has_good_line(const std::string& command);
// Whether the command, which has a good command line, is one of the program that loads LibTorch.
bool loads_libtorch(const std::string& command);

// Makes one case; its files are created in `folder`, which is new and in which the command runs.
BadInput make_bad_input(const std::string& program, const CommandHelp& command, const GoodFiles& good,
                        const std::vector<std::string>& variables, const std::filesystem::path& folder,
                        std::mt19937_64& chance);

// Returns what is wrong with how a command ended, or an empty string. Allowed are success with finite
// numbers, and an error message of Penstock with a documented exit code.
std::string objection(const std::string& command, const Ended& ended);

}  // namespace penstock::test
