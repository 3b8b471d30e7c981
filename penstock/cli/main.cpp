// `penstock`: one command per file of this folder.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <csignal>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "penstock/base/errors.h"
#include "penstock/base/text.h"
#include "penstock/cli/commands.h"

namespace {

// CLI11 reports an unknown command as a missing one; a typo deserves the name that was meant. `words`: what follows the name of `app`.
void require_known_command(const CLI::App& app, std::span<char* const> words) {
  const std::vector<const CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (commands.empty() || words.empty() || words[0][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* command : commands) {
    if (command->get_name() == words[0]) return require_known_command(*command, words.subspan(1));
    names.push_back(command->get_name());
  }
  const std::string nearest = penstock::nearest_name(words[0], names);
  throw penstock::ConfigError(penstock::describe(app.get_parent() == nullptr ? "command" : fmt::format("command of {}", app.get_name()), fmt::format("\"{}\"", words[0]), fmt::format("one of {}", fmt::join(names, ", ")),
                                                 nearest.empty() ? "see --help" : fmt::format("did you mean {}?", nearest)));
}

}  // namespace

int main(int argc, char** argv) {
  using namespace penstock;
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is an error of the write, not the end of the process
  CLI::App app{"Penstock: distributed training from pure C++"};
  app.name("penstock");
  app.require_subcommand(1);
  app.set_version_flag("--version", PENSTOCK_VERSION);
  app.footer("Example: penstock launch -n 4 -- ./my_program\nExit codes: 0 ok, 1 a check failed, 2 usage or parse error, 3 the last checkpoint of a run was not saved.");
  cli::Outcome outcome;
  cli::add_doctor_command(app, outcome);
  cli::add_launch_command(app, outcome);
  cli::add_schedule_command(app, outcome);
  cli::add_check_command(app, outcome);
  cli::add_simulate_command(app, outcome);
  cli::add_compare_command(app, outcome);
  cli::add_trace_command(app, outcome);
  cli::add_data_command(app, outcome);
  cli::add_train_command(app, outcome);
  cli::add_resume_command(app, outcome);
  cli::add_generate_command(app, outcome);
  cli::add_report_command(app, outcome);
  cli::add_parity_command(app, outcome);
  cli::add_inspect_command(app, outcome);
  try {
    require_known_command(app, std::span(argv, static_cast<std::size_t>(argc)).subspan(1));
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);  // prints help, version or what is wrong
    return code == 0 ? 0 : 2;
  } catch (const ConfigError& error) {
    fmt::print(stderr, "penstock: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "penstock: {}\n", error.what());
    return 1;
  }
  return outcome.exit_code;
}
