// penstock parity: checks whether training in a layout matches training in one process.
#include <fmt/format.h>
#include <torch/cuda.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/common/rank_errors.h"
#include "penstock/cli/common/work_folder.h"
#include "penstock/comm/launch/launch_cores.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/errors.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/open_data.h"
#include "penstock/train/job/parity.h"
#include "penstock/world.h"

namespace penstock::cli {

namespace {

namespace fs = std::filesystem;

constexpr const char* kOne = "one";
constexpr const char* kLayout = "layout";

struct ParityFlags {
  int steps = 3;
  double tolerance = -1;  // negative: the default for the layout
  double parameter_tolerance = -1;
  bool all = false;
  std::string keep;    // folder to keep
  std::string worker;  // folder: this process is a rank of `side`
  std::string side;
};

fs::path config_path(const fs::path& folder, const std::string& side) { return folder / (side + ".toml"); }

void write_config(const fs::path& path, const train::ResolvedConfig& resolved) {
  std::ofstream file(path);
  file << train::to_toml(resolved);
  file.close();
  if (!file)
    throw ConfigError(describe("work folder", path.string(), "a file that can be written",
                               "free some space, or set TMPDIR"));
}

int run_rank(const ParityFlags& flags) {
  const comm::World world = comm::World::from_env();
  const fs::path folder = flags.worker;
  const train::TrainConfig config =
      train::load_config({.file = config_path(folder, flags.side), .arguments = {}}).config;
  // Both sides share one data folder: the side that runs first creates it.
  train::record_side(world, config, train::open_data(world, config, folder), folder / flags.side,
                     flags.steps);
  return 0;
}

int start_side(const fs::path& folder, const std::string& side, int ranks, int threads, int steps) {
  comm::LaunchOptions options;
  options.ranks = ranks;
  options.command = {fs::read_symlink("/proc/self/exe").string(),
                     "parity",
                     "--worker",
                     folder.string(),
                     "--side",
                     side,
                     "--steps",
                     std::to_string(steps)};
  // Matrix products may depend on the number of threads: both sides use the same number.
  if (std::getenv("OMP_NUM_THREADS") == nullptr)
    options.environment.emplace_back("OMP_NUM_THREADS", std::to_string(threads));
  const RankErrors errors;
  errors.listen(options);
  const int code = comm::launch(options).exit_code;
  errors.print();
  return code;
}

// Both sides use the same kind of device.
std::string common_device(const train::LayoutConfig& layout) {
  if (layout.device != "auto") return layout.device;
  return torch::cuda::is_available() && static_cast<std::int64_t>(torch::cuda::device_count()) >= layout.ranks
             ? "cuda"
             : "cpu";
}

std::string layout_words(const train::LayoutConfig& layout) {
  return fmt::format(
      "pp {}, virtual stages {}, dp {}, shard {}, ep {}, tp {}{}, {}, {} microbatches of {} rows, {}",
      layout.pp, layout.virtual_stages, layout.dp, layout.shard, layout.ep, layout.tp,
      layout.sequence_parallel ? " with sequence parallelism" : "", layout.schedule, layout.microbatches,
      layout.microbatch_size, layout.device);
}

int run(const CLI::App& command, const ParityFlags& flags) {
  if (!flags.worker.empty()) return report_to_parent([&] { return run_rank(flags); });
  train::ResolvedConfig layout = train::load_config(config_sources(command));
  refuse_keys(layout, "parity", has_effect_without_run);
  layout.config.layout.device = common_device(layout.config.layout);
  train::check_host(layout.config, layout.config.layout.ranks);
  train::ResolvedConfig one = layout;
  one.config = train::one_process(layout.config);
  train::ParityTolerance tolerance = train::parity_tolerance(layout.config);
  const bool same_bits = tolerance.gradients == 0;
  if (flags.tolerance >= 0) tolerance = {.gradients = flags.tolerance, .parameters = 10 * flags.tolerance};
  if (flags.parameter_tolerance >= 0) tolerance.parameters = flags.parameter_tolerance;

  const WorkFolder folder("parity", flags.keep);
  write_config(config_path(folder.path(), kOne), one);
  write_config(config_path(folder.path(), kLayout), layout);
  const int ranks = static_cast<int>(layout.config.layout.ranks),
            threads = comm::threads_per_rank(comm::available_cores(), ranks);
  fmt::print("{} in one process and in the layout: {}\n", count_of(flags.steps, "step"),
             layout_words(layout.config.layout));
  if (tolerance.gradients == 0 && tolerance.parameters == 0) {
    fmt::print("expected: equal values{}\n\n",
               same_bits ? ", because stages and schedule do not change any sum" : "");
  } else {
    fmt::print(
        "expected: relative differences of at most {:g} in losses and gradients, {:g} in parameters\n\n",
        tolerance.gradients, tolerance.parameters);
  }
  std::fflush(stdout);
  if (const int code = start_side(folder.path(), kOne, 1, threads, flags.steps); code != 0) return code;
  if (const int code = start_side(folder.path(), kLayout, ranks, threads, flags.steps); code != 0)
    return code;
  const train::ParityReport report =
      train::compare_sides(folder.path() / kOne, folder.path() / kLayout, flags.steps, tolerance);
  fmt::print("{}", train::to_text(report, flags.all));
  return report.ok() ? 0 : 1;
}

}  // namespace

void add_parity_command(CLI::App& app, CommandOutcome& outcome) {
  CLI::App* command = add_tensor_subcommand(app, "parity");
  command->footer(
      "Usage: penstock parity [CONFIG.toml] [--section.key value ...] [--steps N]\n\n"
      "penstock train --help lists the keys; those of [checkpoint] and [output] have no effect here.\n"
      "Examples:\n"
      "  penstock parity --pp 2 --schedule ZBVZeroBubble\n"
      "  penstock parity my.toml --dp 2 --tp 2 --tolerance 1e-5 --all\n\n"
      "Pipelines must produce equal values on the CPU; replicas and tensor parallelism may differ by "
      "rounding (docs/training.md).\n"
      "The length of the learning rate schedule is --training.steps here. Exit codes: 0 equal, 1 different, "
      "2 usage or parse error.");
  const auto flags = std::make_shared<ParityFlags>();
  add_whole(*command, "--steps", flags->steps, 1, 10000, "Number of steps to compare");
  add_number(*command, "--tolerance", flags->tolerance, {.low = 0, .high = 1e9},
             "Maximum difference of losses and gradients, relative to a tensor's largest element; ten times "
             "as much for parameters");
  add_number(*command, "--parameter-tolerance", flags->parameter_tolerance, {.low = 0, .high = 1e9},
             "Maximum difference of parameters, in the same units");
  command->add_flag("--all", flags->all, "Show every tensor of every step, not only the worst ones");
  command->add_option("--keep", flags->keep, "Keep the compared files in this new folder")
      ->type_name("FOLDER");
  command->add_option("--worker", flags->worker, "Internal: run as one of the ranks")->group("");
  command->add_option("--side", flags->side, "Internal: which side")->group("");
  command->allow_extras();
  command->callback([command, flags, &outcome] { outcome.exit_code = run(*command, *flags); });
}

}  // namespace penstock::cli
