// penstock inspect graph: shows a file written by save_graph, or captures the trainer's model.
#include <fmt/format.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/printable.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/tensor/captured_model.h"
#include "penstock/errors.h"
#include "penstock/graph/tools/draw.h"
#include "penstock/graph/tools/graph_report.h"
#include "penstock/graph/tools/kernel_report.h"
#include "penstock/graph/tools/memory_report.h"
#include "penstock/train/job/configured_activations.h"

namespace penstock::cli {
namespace {

namespace fs = std::filesystem;

struct InspectFlags {
  std::string html, svg, dot, save;
  std::size_t nodes = 20;
  bool min_cut = false, passes = false, kernels = false, sources = false;
};

void inspect_graph(const CLI::App& command, const InspectFlags& flags) {
  std::vector<std::string> rest = command.remaining();
  const bool is_file =
      !rest.empty() && !rest.front().starts_with("-") && fs::path(rest.front()).extension() != ".toml";
  graph::GraphFile file;
  if (flags.sources && !flags.kernels)
    throw ConfigError("inspect graph --sources prints the sources of generated kernels; add --kernels");
  if (flags.kernels)
    refuse_options(command, {"--html", "--svg", "--dot", "--save", "--passes", "--nodes"},
                   "beside --kernels, which prints kernels alone");
  std::string title, passes, kernels;
  train::ModelActivations activations;
  if (is_file) {
    refuse_options(command, {"--min-cut", "--passes"}, "for a file, which defines what is saved");
    refuse_options(command, {"--kernels", "--sources"}, "for a file, which has no values to run with");
    if (rest.size() > 1)
      throw ConfigError(describe("argument", rest[1], "nothing after the file", "leave it out"));
    try {
      file = graph::load_graph(rest.front());
    } catch (const ValueError& error) {
      throw ConfigError(error.what());
    }
    title = rest.front();
  } else {
    const train::ResolvedConfig resolved = train::load_config(config_sources(command));
    refuse_keys(resolved, "inspect graph", [&](const std::string& key) {
      return key.starts_with("model.") || key.starts_with("layout.") ||
             (flags.kernels && (key == "training.compile_exact" || key == "training.precision")) ||
             ((flags.passes || flags.kernels || key != "training.disable_passes") &&
              (key == "training.compile" || key == "training.disable_passes" ||
               key == "training.activation_budget" || key == "training.activation_policy"));
    });
    activations = train::activations_of_whole_model(resolved.config);
    if (flags.min_cut && activations.options.decide())
      throw ConfigError(
          "inspect graph --min-cut recomputes by a rule of its own, which leaves nothing to "
          "training.activation_budget and training.activation_policy; leave --min-cut out, or them");
    CapturedModel captured = capture_model(resolved.config, flags.min_cut,
                                           flags.kernels  ? CaptureFor::Running
                                           : flags.passes ? CaptureFor::WithPasses
                                                          : CaptureFor::Reading);
    if (flags.kernels)
      kernels =
          graph::kernel_report(captured.halves, captured.inputs,
                               {.exact = resolved.config.training.compile_exact, .sources = flags.sources});
    file = std::move(captured.file);
    passes = std::move(captured.passes);
    title = title_of(resolved.config);
  }
  fmt::print("{}\n", printable(title));
  if (flags.passes) fmt::print("passes\n{}\nafter the passes\n", passes);
  if (flags.kernels) {
    fmt::print("kernels\n{}", kernels);
    return;
  }
  if (activations.options.decide())
    fmt::print("activations\n{}{}{}\n", activations.note, activations.note.empty() ? "" : "\n",
               graph::ActivationReport(file.joint, activations.options).saving_text());
  fmt::print("{}", graph::report_text(file, {.nodes = flags.nodes}));
  const graph::DrawOptions options{.title = title, .saved = file.saved};
  if (!flags.html.empty()) write_shown(flags.html, graph::to_html(file.joint.graph, options));
  if (!flags.svg.empty()) write_shown(flags.svg, graph::to_svg(file.joint.graph, options));
  if (!flags.dot.empty()) write_shown(flags.dot, graph::to_dot(file.joint.graph, options));
  if (!flags.save.empty()) {
    graph::save_graph(flags.save, file);
    fmt::print("wrote {}\n", printable(flags.save));
  }
}

}  // namespace

void add_inspect_graph_command(CLI::App& inspect, CommandOutcome&) {
  CLI::App* command =
      inspect.add_subcommand("graph", "Nodes, aliases, writes and saved bytes of a captured graph");
  const auto flags = std::make_shared<InspectFlags>();
  command
      ->add_option("--html", flags->html,
                   "Write an HTML page; repeated blocks are one box that expands on a click")
      ->type_name("FILE.html");
  command->add_option("--svg", flags->svg, "Write the initial picture of that page as SVG")
      ->type_name("FILE.svg");
  command->add_option("--dot", flags->dot, "Write all nodes as Graphviz input")->type_name("FILE.dot");
  command->add_option("--save", flags->save, "Write the captured graph to a file")->type_name("FILE");
  add_whole(*command, "--nodes", flags->nodes, 0, 1 << 30,
            "Rows of the node table to print (default 20; 0: all)");
  command->add_flag("--min-cut", flags->min_cut,
                    "Report the saved bytes if cheap values are recomputed in the backward");
  command->add_flag("--passes", flags->passes,
                    "Run the passes of training.compile = graph, print what each one saved, and report the "
                    "graph after them");
  command->add_flag(
      "--kernels", flags->kernels,
      "Compile the graph as training.compile = fused does, run it, and print the generated "
      "kernels alone: operators, bytes moved, time, share of the step, rate beside that of a copy");
  command->add_flag("--sources", flags->sources, "With --kernels: print the source of each kernel, too");
  command->allow_extras();
  command->footer(
      "Usage: penstock inspect graph FILE\n"
      "       penstock inspect graph [CONFIG.toml] [--section.key value ...]\n\n"
      "FILE is written by --save or by the library's save_graph. Without FILE, the configured model is "
      "captured (keys of [model] and [layout]; penstock train --help),\n"
      "forward and backward of one microbatch on the CPU; nothing is computed, except by --kernels, which "
      "runs\n"
      "on a GPU with --layout.device cuda.\n"
      "Examples:\n"
      "  penstock inspect graph --preset tiny --html model.html --save model.psgraph\n"
      "  penstock inspect graph --preset tiny --svg model.svg\n"
      "  penstock inspect graph --preset tiny --passes --nodes 1\n"
      "  penstock inspect graph --preset tiny --kernels --sources\n"
      "  penstock inspect graph --preset gpt2-124m --kernels --layout.device cuda --layout.microbatch_size "
      "8\n"
      "  penstock inspect graph --preset tiny --schedule 1F1B --training.compile graph "
      "--training.activation_budget 0.5\n"
      "  penstock inspect graph model.psgraph --nodes 0\n"
      "Exit codes: 0 ok, 2 a file or configuration that cannot be read.");
  command->callback([command, flags] { inspect_graph(*command, *flags); });
}

}  // namespace penstock::cli
