// penstock inspect: shows what a configuration creates and what the library has written. One file per
// subcommand.
#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/commands.h"

namespace penstock::cli {

void add_inspect_command(CLI::App& app, CommandOutcome& outcome) {
  CLI::App* command = add_tensor_subcommand(app, "inspect");
  command->require_subcommand(1);
  command->footer(
      "Examples: penstock inspect memory my.toml\n          penstock inspect graph --preset tiny --html "
      "model.html\nEach subcommand has its own --help.");
  add_inspect_memory_command(*command, outcome);
  add_inspect_graph_command(*command, outcome);
  add_inspect_costs_command(*command, outcome);
}

}  // namespace penstock::cli
