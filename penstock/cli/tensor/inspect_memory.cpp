// penstock inspect memory: memory of each rank by category, as predicted by the plan and as measured over a
// few steps.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/common/rank_errors.h"
#include "penstock/cli/common/work_folder.h"
#include "penstock/cli/tensor/captured_model.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/errors.h"
#include "penstock/graph/tools/memory_report.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/train/job/configured_activations.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/open_data.h"
#include "penstock/train/plan/dry_run.h"
#include "penstock/train/plan/measure_memory.h"
#include "penstock/world.h"

namespace penstock::cli {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kRanksShown = 32;

struct InspectMemoryFlags {
  int steps = 3;
  bool predict_only = false;
  bool json = false;
  std::string html;
  std::string worker;  // folder: this process is one of the ranks
};

// Bytes by column, in table order.
constexpr const char* kColumns[] = {"parameters", "gathered",    "gradients",
                                    "optimizer",  "activations", "together"};
using Row = std::vector<std::int64_t>;

Row row_of(const train::RankMemory& memory) {
  return {memory.parameters, memory.gathered,    memory.gradients,
          memory.optimizer,  memory.activations, memory.total()};
}
Row row_of(const train::MeasuredMemory& memory) {
  return {memory.parameters, memory.gathered,    memory.gradients,
          memory.optimizer,  memory.activations, memory.together};
}

nlohmann::json json_of(const Row& row) {
  nlohmann::json bytes;
  for (std::size_t i = 0; i < row.size(); ++i) bytes[kColumns[i]] = row[i];
  return bytes;
}

struct RankRows {
  std::int64_t pp = 0, dp = 0, tp = 0;
  Row predicted;
  std::optional<Row> measured;
};

fs::path config_path(const fs::path& folder) { return folder / "config.toml"; }
fs::path rank_path(const fs::path& folder, std::size_t rank) {
  return folder / fmt::format("rank-{}.json", rank);
}

void write_file(const fs::path& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file)
    throw ConfigError(describe("work folder", path.string(), "a file that can be written",
                               "free some space, or set TMPDIR"));
}

int run_rank(const InspectMemoryFlags& flags) {
  count_cpu_memory();
  const comm::World world = comm::World::from_env();
  const fs::path folder = flags.worker;
  const train::TrainConfig config = train::load_config({.file = config_path(folder), .arguments = {}}).config;
  const train::MeasuredMemory measured =
      train::measure_memory(world, config, train::open_data(world, config, folder), flags.steps);
  write_file(rank_path(folder, static_cast<std::size_t>(world.rank())), json_of(row_of(measured)).dump());
  return 0;
}

Row read_rank(const fs::path& folder, std::size_t rank) {
  std::ifstream file(rank_path(folder, rank));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const nlohmann::json bytes = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  Row row;
  for (const char* column : kColumns) {
    if (!bytes.is_object() || !bytes.contains(column))
      throw StateError(fmt::format("inspect memory: rank {} has written no measurement", rank));
    row.push_back(bytes.at(column).get<std::int64_t>());
  }
  return row;
}

// Starts the ranks of the layout. Returns a nonzero exit code if they failed.
int measure(const train::ResolvedConfig& resolved, const InspectMemoryFlags& flags,
            std::vector<RankRows>& ranks) {
  const WorkFolder folder("inspect");
  write_file(config_path(folder.path()), train::to_toml(resolved));
  comm::LaunchOptions options;
  options.ranks = static_cast<int>(ranks.size());
  options.command = {fs::read_symlink("/proc/self/exe").string(),
                     "inspect",
                     "memory",
                     "--worker",
                     folder.path().string(),
                     "--steps",
                     std::to_string(flags.steps)};
  const RankErrors errors;
  errors.listen(options);
  const int code = comm::launch(options).exit_code;
  errors.print();
  if (code != 0) return code;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    ranks[rank].measured = read_rank(folder.path(), rank);
  return 0;
}

std::string to_text(const train::DryRun& plan, const std::vector<RankRows>& ranks, int steps) {
  const bool measured = ranks.front().measured.has_value();
  std::string text = fmt::format(
      "peak memory of the ranks{}\n",
      measured
          ? fmt::format(": predicted, and measured over {} after two warm-up steps", count_of(steps, "step"))
          : ", predicted");
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "  {:<26}{:<11}", "rank", "");
  for (const char* column : kColumns) fmt::format_to(out, "{:>13}", column);
  text += '\n';
  const auto line = [&](const std::string& head, const char* kind, const Row& row) {
    fmt::format_to(out, "  {:<26}{:<11}", head, kind);
    for (const std::int64_t bytes : row)
      fmt::format_to(out, "{:>13}",
                     format_bytes(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0))));
    text += '\n';
  };
  for (std::size_t rank = 0; rank < std::min(ranks.size(), kRanksShown); ++rank) {
    const RankRows& each = ranks[rank];
    line(fmt::format("{} (pp {}, dp {}, tp {})", rank, each.pp, each.dp, each.tp), "predicted",
         each.predicted);
    if (each.measured) line("", "measured", *each.measured);
  }
  if (ranks.size() > kRanksShown)
    fmt::format_to(out, "  ... {} more; --json prints all of them\n", ranks.size() - kRanksShown);
  fmt::format_to(out,
                 "gathered: unsharded parameters on a rank that holds shards. activations: kept by "
                 "microbatches for their backward, on {}.\n",
                 plan.device);
  text += measured
              ? "together: predicted is the sum; measured is the peak, including temporary memory of "
                "kernels. LibTorch itself is not included.\n"
              : "together: the sum. LibTorch itself and the temporary memory of kernels are not included.\n";
  return text;
}

std::string to_json(const train::DryRun& plan, const std::vector<RankRows>& ranks, int steps) {
  nlohmann::json all{{"unit", "bytes"}, {"device", plan.device}, {"ranks", nlohmann::json::array()}};
  if (ranks.front().measured) all["steps"] = steps;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankRows& each = ranks[rank];
    nlohmann::json entry{{"rank", rank},
                         {"pp", each.pp},
                         {"dp", each.dp},
                         {"tp", each.tp},
                         {"predicted", json_of(each.predicted)}};
    if (each.measured) entry["measured"] = json_of(*each.measured);
    all["ranks"].push_back(std::move(entry));
  }
  return all.dump(1) + "\n";
}

// The graph of the model, tensor by tensor.
void show_tensors(const train::TrainConfig& config, const InspectMemoryFlags& flags) {
  if (flags.json && flags.html.empty()) return;
  CapturedModel captured = capture_model(config, /*min_cut=*/false, CaptureFor::WithPasses);
  const train::ModelActivations activations = train::activations_of_whole_model(config);
  const graph::ActivationReport report(captured.file.joint, activations.options);
  std::string title = title_of(config);
  if (!activations.note.empty()) title += "; " + activations.note;
  if (!flags.json)
    fmt::print("\ngraph of the whole {}\n{}\n{}", printable(title), report.peak_text(), report.saving_text());
  if (flags.html.empty()) return;
  (flags.json ? &write_output : &write_shown)(flags.html, report.to_html(title));
}

int run(const CLI::App& command, const InspectMemoryFlags& flags) {
  if (!flags.worker.empty()) return report_to_parent([&] { return run_rank(flags); });
  const train::ResolvedConfig resolved = train::load_config(config_sources(command));
  refuse_keys(resolved, "inspect memory", has_effect_without_run);
  if (!flags.html.empty() && resolved.config.training.compile == "off")
    throw ConfigError(
        "inspect memory --html draws the tensors of the captured graph, and training.compile = \"off\" "
        "captures "
        "none; add --training.compile graph, or leave --html out");
  if (flags.predict_only) refuse_options(command, {"--steps"}, "with --predict-only, which runs no steps");
  const train::LayoutConfig& layout = resolved.config.layout;
  const train::DryRun plan = train::dry_run(resolved.config);
  std::vector<RankRows> ranks;
  for (std::int64_t rank = 0; rank < layout.ranks; ++rank) {
    RankRows rows{.pp = rank / (layout.dp * layout.tp),
                  .dp = rank / layout.tp % layout.dp,
                  .tp = rank % layout.tp,
                  .predicted = {},
                  .measured = {}};
    rows.predicted = row_of(plan.memory.at(static_cast<std::size_t>(rows.pp)));
    ranks.push_back(std::move(rows));
  }
  if (!flags.predict_only) train::check_host(resolved.config, layout.ranks);
  if (!flags.predict_only)
    if (const int code = measure(resolved, flags, ranks); code != 0) return code;
  fmt::print("{}", flags.json ? to_json(plan, ranks, flags.steps) : to_text(plan, ranks, flags.steps));
  if (resolved.config.training.compile != "off") show_tensors(resolved.config, flags);
  return 0;
}

}  // namespace

void add_inspect_memory_command(CLI::App& inspect, CommandOutcome& outcome) {
  CLI::App* command = inspect.add_subcommand("memory",
                                             "Predicted and measured memory of every rank: parameters, "
                                             "gathered parameters, gradients, optimizer, activations");
  command->footer(
      "Usage: penstock inspect memory [CONFIG.toml] [--section.key value ...]\n\n"
      "penstock train --help lists the keys; those of [checkpoint] and [output] have no effect here.\n"
      "Examples:\n"
      "  penstock inspect memory my.toml\n"
      "  penstock inspect memory --pp 2 --dp 2 --shard 2 --steps 5\n"
      "  penstock inspect memory --preset small --dp 8 --shard 8 --predict-only --json\n"
      "  penstock inspect memory --preset tiny --pp 1 --schedule 1F1B --compile graph --activation_budget "
      "0.5 "
      "--html memory.html\n\n"
      "Starts the ranks of the layout on this host and trains a few steps without saving anything. The "
      "prediction is that of\n"
      "penstock train --dry-run, which knows nothing of captured graphs. With training.compile = graph, the "
      "graph of the whole model is captured,\n"
      "too: what is live at the peak of a microbatch, what is saved and recomputed "
      "(training.activation_budget). "
      "The length of the learning rate schedule is --training.steps here.\n"
      "Exit codes: 0 ok, 1 a rank failed, 2 usage or parse error.");
  const auto flags = std::make_shared<InspectMemoryFlags>();
  add_whole(*command, "--steps", flags->steps, 1, 1000, "Number of steps to measure");
  command->add_flag("--predict-only", flags->predict_only, "Start no ranks; print only the prediction");
  command->add_flag("--json", flags->json, "Print bytes as JSON");
  command
      ->add_option("--html", flags->html,
                   "Write a picture of the memory of the captured graph over a step, tensor by tensor (needs "
                   "training.compile = graph)")
      ->type_name("FILE.html");
  command->add_option("--worker", flags->worker, "Internal: run as one of the ranks")->group("");
  command->allow_extras();
  command->callback([command, flags, &outcome] { outcome.exit_code = run(*command, *flags); });
}

}  // namespace penstock::cli
