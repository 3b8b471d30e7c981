// The commands that run without LibTorch.
#pragma once

#include <CLI/CLI.hpp>

#include "penstock/cli/common/commands.h"

namespace penstock::cli {

void add_plain_commands(CLI::App& app, CommandOutcome& outcome);

}  // namespace penstock::cli
