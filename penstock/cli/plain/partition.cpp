// penstock partition: how the blocks of a model are divided over the stages and ranks of a pipeline.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/plain/partition_plan.h"
#include "penstock/cli/plain/partition_text.h"
#include "penstock/cli/plain/schedule_flags.h"
#include "penstock/errors.h"
#include "penstock/plan/cost/cost_text.h"

namespace penstock::cli {
namespace {

constexpr int kMostStages = 65535;

struct PartitionFlags {
  int stages = 0;
  std::string by, cuts, placement, memory_limit, activations, costs, output;
  std::string minimize = "stage";
  bool json = false;
};

std::vector<int> read_cuts(const std::string& text) {
  std::vector<int> cuts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    cuts.push_back(
        static_cast<int>(read_integer("--cuts", text.substr(begin, end - begin), 1, kMostStages,
                                      "give the first blocks of stages 1, 2, ..., for example 4,9,13")));
    begin = end + 1;
  }
  return cuts;
}

std::vector<double> read_bytes_list(const char* flag, const std::string& text) {
  std::vector<double> values;
  if (text.empty()) return values;
  for (const std::int64_t bytes : plan::parse_bytes_list(flag, text))
    values.push_back(static_cast<double>(bytes));
  return values;
}

// What divides the model if --by is not given: cuts first, as in training.
std::string default_by(const train::TrainConfig& config, const PartitionFlags& flags) {
  if (!flags.cuts.empty()) return "cuts";
  return config.model.pattern.find('|') != std::string::npos ? "pattern" : config.layout.partition;
}

PartitionRequest request_of(const CLI::App& command, const PartitionFlags& flags,
                            const train::TrainConfig& config) {
  PartitionRequest request;
  request.stages = flags.stages;
  request.by = flags.by.empty() ? default_by(config, flags)
                                : one_of("--by", flags.by, {"count", "weight", "cost", "pattern"});
  if (!flags.cuts.empty()) {
    refuse_options(command, {"--by"}, "with --cuts");
    request.cuts = read_cuts(flags.cuts);
    if (flags.stages == 0) request.stages = static_cast<int>(request.cuts.size()) + 1;
  }
  const std::size_t bars =
      static_cast<std::size_t>(std::count(config.model.pattern.begin(), config.model.pattern.end(), '|'));
  if (request.by == "pattern" && bars == 0)
    throw ConfigError(describe("--by pattern", "a model.pattern without cuts", "'|' where a stage ends",
                               "for example --pattern \"AE|ME\", or choose count, weight or cost"));
  if (!flags.placement.empty())
    request.placement = schedule::parse_stage_placement(
        one_of("--placement", flags.placement, {"loop", "v", "bidirectional"}));
  request.minimize = one_of("--minimize", flags.minimize, {"stage", "rank"}) == "rank" ? plan::Slowest::Rank
                                                                                       : plan::Slowest::Stage;
  request.limits = read_bytes_list("--memory-limit", flags.memory_limit);
  if (request.limits.size() > 1 && request.limits.size() != static_cast<std::size_t>(config.layout.pp))
    throw ConfigError(
        describe("--memory-limit", fmt::format("{} values", request.limits.size()),
                 fmt::format("one value, or one for each of {} pipeline ranks", config.layout.pp)));
  request.activations = read_bytes_list("--activations", flags.activations);
  request.costs = flags.costs;
  return request;
}

void run_partition(const CLI::App& command, const PartitionFlags& flags) {
  const train::ConfigSources sources = config_sources(command);
  const train::ResolvedConfig resolved = train::load_config(sources);
  refuse_keys(resolved, "partition", [](const std::string& key) {
    return key.starts_with("model.") || key.starts_with("layout.") || key.starts_with("training.optimizer") ||
           key == "training.momentum";
  });
  const PartitionPlan plan = plan_partition(resolved.config, request_of(command, flags, resolved.config));
  const std::string title =
      sources.file ? sources.file->filename().string() : "preset " + resolved.config.model.preset;
  if (!flags.output.empty()) write_text(flags.output, draw(plan, title));
  if (flags.output != "-") write_text("", flags.json ? to_json(plan) : to_text(plan));
}

}  // namespace

void add_partition_command(CLI::App& app, CommandOutcome&) {
  CLI::App* command =
      app.add_subcommand("partition", "Show and draw how a model is divided over the stages of a pipeline");
  const auto flags = std::make_shared<PartitionFlags>();
  add_whole(*command, "--stages", flags->stages, 1, kMostStages,
            "Stages, any number: the last leg of a loop or V may be partial (default: as in the layout)");
  command
      ->add_option(
          "--by", flags->by,
          "count; weight: parameters, greedy; cost: optimal; pattern: '|' in model.pattern (default: "
          "the pattern if it has cuts, else layout.partition)")
      ->type_name("X");
  command->add_option("--cuts", flags->cuts, "First blocks of stages 1, 2, ..., such as 4,9,13")
      ->type_name("N");
  command
      ->add_option(
          "--minimize", flags->minimize,
          "By cost: stage, the slowest stage, as in training, or rank, the slowest sum of a rank's stages "
          "(default stage)")
      ->type_name("X");
  command
      ->add_option("--placement", flags->placement,
                   "Stages on ranks: loop, v or bidirectional (default: that of layout.schedule)")
      ->type_name("X");
  command
      ->add_option(
          "--memory-limit", flags->memory_limit,
          "Bytes of a rank: 80G, or one value per pipeline rank separated by colons; by cost the best "
          "split within it")
      ->type_name("B");
  command
      ->add_option("--activations", flags->activations,
                   "Bytes of activations that a stage keeps: 2G, or one value per stage separated by colons")
      ->type_name("B");
  command
      ->add_option("--costs", flags->costs,
                   "Measured costs, written by penstock inspect costs (default: estimated)")
      ->type_name("F");
  command->add_flag("--json", flags->json, "Print JSON");
  command->add_option("-o,--output", flags->output, "SVG picture to write; - for standard output")
      ->type_name("F");
  command->footer(
      "Usage: penstock partition [CONFIG.toml] [--section.key value ...]\n\n"
      "Examples:\n"
      "  penstock partition my.toml\n"
      "  penstock partition --preset hybrid-52 --pp 4 --by weight\n"
      "  penstock partition --preset hybrid-52 --pp 4 --schedule ZBVZeroBubble --minimize rank "
      "--memory-limit 20G "
      "-o parts.svg\n\n"
      "Keys are those of [model], [layout] and training.optimizer. Built-in models only; needs no LibTorch.\n"
      "The last line is the result as model.pattern, for training with just these cuts.\n"
      "Exit codes: 0 ok, 2 usage or parse error, or a limit that cannot be kept.");
  command->allow_extras();
  command->callback([command, flags] { run_partition(*command, *flags); });
}

}  // namespace penstock::cli
