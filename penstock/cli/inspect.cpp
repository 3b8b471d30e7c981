// penstock inspect: looks into what a configuration makes. One file for each thing to look at.
#include "penstock/cli/commands.h"

namespace penstock::cli {

void add_inspect_command(CLI::App& app, Outcome& outcome) {
  CLI::App* command = app.add_subcommand("inspect", "Look into a configuration: memory of the ranks");
  command->require_subcommand(1);
  command->footer("Example: penstock inspect memory my.toml\nEach has its own --help.");
  add_inspect_memory_command(*command, outcome);
}

}  // namespace penstock::cli
