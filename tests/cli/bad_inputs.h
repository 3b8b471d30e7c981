// Bad inputs for every command of `penstock`, made by chance, and what no answer to them may look like.
//
// Commands, their options and the variables of the environment are read from the program itself: a new command or option takes part without
// being named here. Only a good command line for each command is written down (bad_inputs.cpp), which a case then spoils.
#pragma once

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "tests/command.h"

namespace penstock::test {

struct CommandOption {
  std::string flag;          // "--ranks"
  bool takes_value = false;
};

struct CommandHelp {
  std::string name;          // "data make"
  std::vector<CommandOption> options;
};

// What can be called, by the --help of the program and of its commands.
std::vector<CommandHelp> all_commands(const std::string& program);
// Names of variables in the bytes of the program: PENSTOCK_...
std::vector<std::string> own_variables(const std::string& program);

// Good files of each kind, made once by the program itself.
struct GoodFiles {
  std::filesystem::path text, config, schedule, graph, run, trace, shards;
  std::vector<std::string> keys;  // of configurations: "training.lr"
};
// Throws std::runtime_error with the program's output where one of them cannot be made.
GoodFiles make_good_files(const std::string& program, const std::filesystem::path& folder);

struct BadInput {
  std::string kind;     // what was spoiled
  std::string command;  // for the shell
};

// Whether a good command line for the command is known; without one it cannot be tried.
bool has_good_line(const std::string& command);

// One case; its files are made in `folder`, which is new and where the command runs.
BadInput make_bad_input(const std::string& program, const CommandHelp& command, const GoodFiles& good, const std::vector<std::string>& variables,
                        const std::filesystem::path& folder, std::mt19937_64& chance);

// What is wrong with how a command ended; empty when nothing is. Allowed are success with numbers that are numbers, and a refusal in our own words
// with an exit code of the documentation.
std::string objection(const std::string& command, const Ended& ended);

}  // namespace penstock::test
