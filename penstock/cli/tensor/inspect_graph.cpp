// penstock inspect graph: shows a file written by save_graph, or captures the trainer's model.
#include <fmt/format.h>
#include <torch/types.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/printable.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/partition/partition.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/graph/tools/draw.h"
#include "penstock/graph/tools/graph_report.h"
#include "penstock/graph/tools/pass_report.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/process_memory.h"

namespace penstock::cli {
namespace {

namespace fs = std::filesystem;

struct InspectFlags {
  std::string html, svg, dot, save;
  std::size_t nodes = 20;
  bool min_cut = false, passes = false;
};

struct CapturedModel {
  graph::GraphFile file;
  std::string passes;  // what they did, if asked for
};

// Captures forward and backward of one microbatch of the trainer's model, shapes only.
CapturedModel capture_model(const train::TrainConfig& config, bool min_cut, bool with_passes) {
  const std::shared_ptr<models::TrainableModel> trainable = train::configured_model(config);
  const std::shared_ptr<models::ModelStage> model = trainable->make_stage(whole_model(trainable->plan()));
  const graph::ModuleState state(*model);
  graph::Values inputs(state.tensors.begin(), state.tensors.end());
  const at::Tensor tokens = at::zeros({config.layout.microbatch_size, config.model.context}, at::kLong);
  inputs.emplace_back(tokens);
  inputs.emplace_back(at::zeros_like(tokens));
  graph::Convention convention{state.tensors.size(), state.names};
  convention.names.insert(convention.names.end(), {"tokens", "targets"});
  const graph::Function step = [&](const graph::Values& in) -> graph::Values {
    const at::Tensor x = in[state.tensors.size()].toTensor(),
                     targets = in[state.tensors.size() + 1].toTensor();
    const models::StageInputs given =
        trainable->inputs({.tokens = x, .targets = targets, .documents = at::Tensor()});
    const at::Tensor output = model->forward_with(x, given.keywords);
    return {model->loss(output, targets, static_cast<double>(tokens.numel()))};
  };
  graph::AnalyzedCapture captured = graph::analyze_and_capture(step, inputs, {.convention = convention});
  graph::GraphFile file;
  file.meta = std::move(captured.meta);
  file.joint =
      captured.joint ? std::move(*captured.joint) : graph::capture_joint(step, inputs, file.meta, convention);
  file.joint.graph = graph::functionalize(std::move(file.joint.graph), file.joint.forward_outputs);
  graph::remove_dead_nodes(file.joint.graph);
  std::string passes;
  if (with_passes) {
    graph::PassedGraph passed = graph::with_passes(
        std::move(file.joint), graph::PassList(config.training.disable_passes, /*verify=*/true),
        {.static_inputs = state.tensors.size(),
         .partitioner = min_cut ? graph::Partitioner::MinCut : graph::Partitioner::Default});
    file.joint = std::move(passed.joint);
    passes = std::move(passed.text);
  }
  file.saved = (min_cut ? graph::partition_min_cut(file.joint) : graph::partition_default(file.joint)).saved;
  file.signature = graph::make_signature(
      file.joint, file.meta,
      {.state = &state, .loss_index = 0, .hidden_outputs = 0, .in_spec = "(*, *)", .out_spec = "*"});
  return {std::move(file), std::move(passes)};
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.close();
  if (!out)
    throw ConfigError(describe("output file", path, "a file that can be written",
                               "check that the folder exists and is writable"));
  fmt::print("wrote {}\n", printable(path));
}

void inspect_graph(const CLI::App& command, const InspectFlags& flags) {
  std::vector<std::string> rest = command.remaining();
  const bool is_file =
      !rest.empty() && !rest.front().starts_with("-") && fs::path(rest.front()).extension() != ".toml";
  graph::GraphFile file;
  std::string title, passes;
  if (is_file) {
    refuse_options(command, {"--min-cut", "--passes"}, "for a file, which defines what is saved");
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
             (flags.passes && (key == "training.compile" || key == "training.disable_passes"));
    });
    // Nothing is computed, but the parameters are allocated.
    train::require_memory(train::minimum_memory_of_capture(resolved.config), train::machine_memory_bytes());
    CapturedModel captured = capture_model(resolved.config, flags.min_cut, flags.passes);
    file = std::move(captured.file);
    passes = std::move(captured.passes);
    title = fmt::format("model {}, one microbatch of {} x {} tokens", resolved.config.model.preset,
                        resolved.config.layout.microbatch_size, resolved.config.model.context);
  }
  fmt::print("{}\n", printable(title));
  if (flags.passes) fmt::print("passes\n{}\nafter the passes\n", passes);
  fmt::print("{}", graph::report_text(file, {.nodes = flags.nodes}));
  const graph::DrawOptions options{.title = title, .saved = file.saved};
  if (!flags.html.empty()) write_text(flags.html, graph::to_html(file.joint.graph, options));
  if (!flags.svg.empty()) write_text(flags.svg, graph::to_svg(file.joint.graph, options));
  if (!flags.dot.empty()) write_text(flags.dot, graph::to_dot(file.joint.graph, options));
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
  command->allow_extras();
  command->footer(
      "Usage: penstock inspect graph FILE\n"
      "       penstock inspect graph [CONFIG.toml] [--section.key value ...]\n\n"
      "FILE is written by --save or by the library's save_graph. Without FILE, the configured model is "
      "captured (keys of [model] and [layout]; penstock train --help),\n"
      "forward and backward of one microbatch on the CPU; nothing is computed.\n"
      "Examples:\n"
      "  penstock inspect graph --preset tiny --html model.html --save model.psgraph\n"
      "  penstock inspect graph --preset tiny --svg model.svg\n"
      "  penstock inspect graph --preset tiny --passes --nodes 1\n"
      "  penstock inspect graph model.psgraph --nodes 0\n"
      "Exit codes: 0 ok, 2 a file or configuration that cannot be read.");
  command->callback([command, flags] { inspect_graph(*command, *flags); });
}

}  // namespace penstock::cli
