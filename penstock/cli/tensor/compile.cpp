// penstock compile: captures and compiles the graphs of all stages of a layout, for training.artifact.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/status_line.h"
#include "penstock/train/config/run_config.h"
#include "penstock/train/job/write_artifact.h"

namespace penstock::cli {
namespace {

// The configuration with stages as graphs, whatever a file says: nothing else can be compiled.
train::ResolvedConfig config_to_compile(train::ConfigSources sources) {
  const auto names_it = [](const std::string& argument) {
    const std::string flag = argument.substr(0, argument.find('='));
    return flag == "--compile" || flag == "--training.compile";
  };
  if (std::none_of(sources.arguments.begin(), sources.arguments.end(), names_it))
    sources.arguments.insert(sources.arguments.end(), {"--training.compile", "graph"});
  return train::load_config(sources);
}

int run(const CLI::App& command, const std::string& output) {
  train::ResolvedConfig resolved = config_to_compile(config_sources(command));
  refuse_keys(resolved, "compile", [](const std::string& key) {
    return has_effect_without_run(key) && !key.starts_with("launch.") && key != "training.artifact";
  });
  resolved = train::with_absolute_paths(std::move(resolved), {});
  resolved.config.training.artifact.clear();
  train::WrittenArtifact written;
  {
    StatusLine line("compile");
    written = train::write_artifact(resolved.config, output, [&](const train::ArtifactProgress& now) {
      line.show(now.doing, static_cast<double>(now.done) / static_cast<double>(now.graphs));
    });
  }
  fmt::print(
      "{}: {} of {} for {}, {} operators, {}, in {:.1f} s\n"
      "to train with it, add to the same configuration: --training.compile {} --training.artifact {}\n",
      printable(output), count_of(static_cast<std::int64_t>(written.graphs), "graph"),
      count_of(static_cast<std::int64_t>(written.stages), "stage"),
      count_of(resolved.config.layout.ranks, "rank"), written.nodes, format_bytes(written.bytes),
      written.seconds, resolved.config.training.compile, printable(output));
  return 0;
}

}  // namespace

void add_compile_command(CLI::App& app, CommandOutcome& outcome) {
  CLI::App* command = add_tensor_subcommand(app, "compile");
  command->footer(
      "Usage: penstock compile [CONFIG.toml] [--section.key value ...] -o FOLDER\n\n"
      "penstock train --help lists the keys; those of [checkpoint], [output] and [launch] have no effect "
      "here.\n"
      "Examples:\n"
      "  penstock compile my.toml -o compiled\n"
      "  penstock train my.toml --compile graph --artifact compiled\n"
      "  penstock compile --preset small --pp 2 --dp 2 --schedule 1F1B -o compiled\n\n"
      "Compiles all stages of the whole layout in this process, on this machine, one after the other, "
      "without "
      "data and without computing anything. The folder is a valid artifact once the command has ended.\n"
      "It is for this build of Penstock, this LibTorch, this model of device and the settings of the "
      "configuration that decide what a graph computes; training refuses another one by the name of the "
      "field (docs/compile_cache.md).\n"
      "Exit codes: 0 ok, 1 a stage cannot be captured or stored, 2 usage or parse error.");
  const auto output = std::make_shared<std::string>();
  command->add_option("-o,--output", *output, "Folder to write; an artifact in it is replaced")
      ->type_name("FOLDER")
      ->required();
  command->allow_extras();
  command->callback([command, output, &outcome] { outcome.exit_code = run(*command, *output); });
}

}  // namespace penstock::cli
