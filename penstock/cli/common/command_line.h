// What both programs of the command line share: parsing, suggestions for typos, messages and exit codes.
//
// `penstock` itself does not load LibTorch, so that commands about schedules, data and reports start at once.
// For a command that computes with tensors it replaces itself by `penstock-tensor`, which has all commands.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string_view>
#include <vector>

#include "penstock/cli/common/commands.h"

namespace penstock::cli {

// A command that needs LibTorch. The table is known to both programs, so that `penstock --help` lists every
// command.
struct TensorCommand {
  const char* name;
  const char* description;
};
const std::vector<TensorCommand>& tensor_commands();

// Adds the subcommand with its description from the table.
CLI::App* add_tensor_subcommand(CLI::App& app, std::string_view name);

// Runs the command that the arguments name and returns the exit code of the process. `add_commands` adds the
// subcommands.
int run_command_line(int argc, char** argv,
                     const std::function<void(CLI::App&, CommandOutcome&)>& add_commands);

}  // namespace penstock::cli
