#include "penstock/cli/common/command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/cli/common/failure.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace {

// CLI11 reports an unknown command as a missing one; a typo deserves the name that was meant. `words`: what
// follows the name of `app`.
void require_known_command(const CLI::App& app, std::span<char* const> words) {
  const std::vector<const CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (commands.empty() || words.empty() || words[0][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* command : commands) {
    if (command->get_name() == words[0]) return require_known_command(*command, words.subspan(1));
    names.push_back(command->get_name());
  }
  const std::string nearest = nearest_name(words[0], names);
  throw ConfigError(
      describe(app.get_parent() == nullptr ? "command" : fmt::format("command of {}", app.get_name()),
               quote(words[0]), fmt::format("one of {}", fmt::join(names, ", ")),
               nearest.empty() ? "see --help" : fmt::format("did you mean {}?", nearest)));
}

// After unexpected arguments: the flags that were meant.
void suggest_flags(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  std::vector<std::string> flags;
  for (const CLI::Option* option : command->get_options())
    if (!option->get_group().empty())
      for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  for (const std::string& argument : command->remaining()) {
    const std::string nearest = argument.starts_with("--")
                                    ? nearest_name(argument.substr(0, argument.find('=')), flags)
                                    : std::string();
    if (!nearest.empty()) fmt::print(stderr, "{}: did you mean {}?\n", quote(argument), nearest);
  }
}

// As all other messages begin, and without raw values: they may hold anything. CLI11 asks the outermost App;
// the page to read is that of the command that was given.
std::string usage_message(const CLI::App* app, const CLI::Error& error) {
  std::string page = app->get_name();
  for (std::vector<CLI::App*> given = app->get_subcommands(); !given.empty();
       given = given.front()->get_subcommands())
    page += " " + given.front()->get_name();
  return fmt::format("penstock: {}; see {} --help\n", printable(shortened(error.what(), 2000)), page);
}

}  // namespace

const std::vector<TensorCommand>& tensor_commands() {
  static const std::vector<TensorCommand> commands = {
      {"doctor",
       "Show hardware, libraries and thread speed of this machine, and test every operation between two "
       "ranks"},
      {"train", "Train a model; starts the ranks of the layout on this host"},
      {"resume", "Continue a run from its newest checkpoint"},
      {"generate", "Generate text with a model trained by penstock train"},
      {"parity", "Compare training in a layout with training in one process: losses, gradients, parameters"},
      {"compile",
       "Capture and compile the graphs of all stages of a layout beforehand, for training.artifact"},
      {"inspect", "Inspect a configuration: memory of the ranks, graph of the model, costs of its parts"},
  };
  return commands;
}

CLI::App* add_tensor_subcommand(CLI::App& app, std::string_view name) {
  const auto& commands = tensor_commands();
  const auto found = std::find_if(commands.begin(), commands.end(),
                                  [&](const TensorCommand& command) { return command.name == name; });
  PENSTOCK_INVARIANT(found != commands.end(), "a command that needs LibTorch is in the table");
  return app.add_subcommand(found->name, found->description);
}

int run_command_line(int argc, char** argv,
                     const std::function<void(CLI::App&, CommandOutcome&)>& add_commands) {
  report_failure_on_terminate();
  // Exceeding the file size limit is an error of the write, not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  CLI::App app{"Penstock: distributed training from pure C++"};
  app.name("penstock");
  app.require_subcommand(1);
  app.set_version_flag("--version", PENSTOCK_VERSION);
  app.footer(
      "Example: penstock launch -n 4 -- ./my_program\n"
      "Exit codes: 0 ok, 1 a check or a run failed, 2 usage or parse error, 3 the last checkpoint of a run "
      "was not saved, 70 a defect of Penstock.");
  app.failure_message(usage_message);
  CommandOutcome outcome;
  add_commands(app, outcome);
  try {
    check_environment();
    require_known_command(app, std::span(argv, static_cast<std::size_t>(argc)).subspan(1));
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);  // prints help, version or what is wrong
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) suggest_flags(app);
    return code == 0 ? 0 : kUsage;
  } catch (...) {
    return report_failure();
  }
  return outcome.exit_code;
}

}  // namespace penstock::cli
