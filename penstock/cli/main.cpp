// `penstock`: one command per file of this folder.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "penstock/base/errors.h"
#include "penstock/base/text.h"
#include "penstock/cli/commands.h"

namespace {

// CLI11 reports an unknown command as a missing one; a typo deserves the name that was meant.
void require_known_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) names.push_back(command->get_name());
  if (std::find(names.begin(), names.end(), argv[1]) != names.end()) return;
  const std::string nearest = penstock::nearest_name(argv[1], names);
  throw penstock::ConfigError(penstock::describe("command", fmt::format("\"{}\"", argv[1]), fmt::format("one of {}", fmt::join(names, ", ")),
                                                 nearest.empty() ? "see penstock --help" : fmt::format("did you mean {}?", nearest)));
}

}  // namespace

int main(int argc, char** argv) {
  using namespace penstock;
  CLI::App app{"Penstock: distributed training from pure C++"};
  app.name("penstock");
  app.require_subcommand(1);
  app.set_version_flag("--version", PENSTOCK_VERSION);
  app.footer("Example: penstock launch -n 4 -- ./my_program\nExit codes: 0 ok, 1 a check failed, 2 usage or parse error.");
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
  cli::add_generate_command(app, outcome);
  cli::add_report_command(app, outcome);
  cli::add_parity_command(app, outcome);
  cli::add_inspect_command(app, outcome);
  try {
    require_known_command(app, argc, argv);
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
