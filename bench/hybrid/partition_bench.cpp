// Partition of models into stages: how long the optimal split takes, how much lighter its slowest stage is
// than that of the greedy split by parameters, and whether a training step follows.
//
//   partition_bench              everything
//   partition_bench --estimate   without training
//   partition_bench --steps 20 --pattern EEEEAMAMAMAM   further flags are keys of penstock train
//
// The step is measured on two CPU ranks of one thread each, which run both splits alternately: the costs of
// the parts are measured first, and "by cost" is optimal for them. Times depend on the machine; compare
// ratios.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "penstock/base/files.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/hybrid_options.h"
#include "penstock/model_plan.h"
#include "penstock/placed_partition.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/open_data.h"
#include "penstock/train/plan/part_costs.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
namespace fs = std::filesystem;
using schedule::StagePlacement;

constexpr int kWarmupSteps = 4;

double processor_ms() { return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// 512 layers: alike, of four kinds, and all different.
std::vector<double> layer_costs(int kind) {
  std::mt19937 random(3);
  std::vector<double> costs;
  for (int i = 0; i < 512; ++i)
    costs.push_back(kind == 0   ? 1
                    : kind == 1 ? (i % 4 == 0   ? 3.1
                                   : i % 2 == 1 ? 9.7
                                                : 2.3)
                                : 1 + static_cast<double>(random() % 1000) / 100);
  return costs;
}

void time_splits() {
  fmt::print("512 layers, optimal split, processor time\n{:<34} {:>12} {:>12} {:>12}\n", "", "alike", "AEME",
             "all different");
  struct Shape {
    const char* title;
    StagePlacement placement;
    int ranks, stages;
    double slack;  // limit / even share of the memory; 0: no limit
  };
  for (const Shape& shape : {Shape{"64 stages on 64 ranks", StagePlacement::Loop, 64, 64, 0},
                             Shape{"the same, memory limit", StagePlacement::Loop, 64, 64, 1.3},
                             Shape{"64 stages on 32 ranks, V", StagePlacement::V, 32, 64, 0},
                             Shape{"16 stages on 8 ranks, V, limit", StagePlacement::V, 8, 16, 1.3},
                             Shape{"16 ranks, bidirectional", StagePlacement::Bidirectional, 16, 32, 0},
                             Shape{"16 stages on 8 ranks, loop", StagePlacement::Loop, 8, 16, 0}}) {
    fmt::print("{:<34}", shape.title);
    for (int kind = 0; kind < 3; ++kind) {
      plan::PlacedLayers layers;
      layers.placement = shape.placement;
      layers.ranks = shape.ranks;
      layers.stages = shape.stages;
      layers.costs = layer_costs(kind);
      layers.ends = {.first = 0.5, .last = 12, .may_be_empty = true};
      layers.bytes = layer_costs(2);
      std::reverse(layers.bytes.begin(), layers.bytes.end());
      double bytes = 0;
      for (const double each : layers.bytes) bytes += each;
      if (shape.slack > 0) layers.limits = {shape.slack * bytes / shape.ranks};
      const double begin = processor_ms();
      const plan::PlacedPartition found = plan::partition_placed(layers);
      fmt::print(" {:>9.1f} ms{}", processor_ms() - begin, found.is_optimal() ? "" : "*");
    }
    fmt::print("\n");
  }
  fmt::print("* the search ended at its limit: at least as good as its bound says, not proven optimal\n\n");
}

// The slowest stage of both splits under the same costs.
void compare_estimates(const std::string& title, const models::ModelPlan& model) {
  const models::PartCosts costs = models::estimated_costs(model);
  const plan::PartitionEnds ends{.first = costs.embed, .last = costs.head, .may_be_empty = true};
  fmt::print("{}: slowest stage, estimated\n", title);
  for (const int stages : {2, 4, 8}) {
    const auto greedy = plan::partition_by_weight(models::block_weights(model), stages);
    const auto best = plan::partition_by_cost(costs.blocks, stages, ends);
    const double by_weight = plan::heaviest(greedy, costs.blocks, ends),
                 by_cost = plan::heaviest(best, costs.blocks, ends);
    fmt::print("  {} stages: by cost {:.1f} % lighter than greedy by weight\n", stages,
               100 * (1 - by_cost / by_weight));
  }
}

// ---- training ----

struct Split {
  std::string title, pattern;
  double slowest = 0;  // of its stages, seconds of a microbatch
  double step = std::numeric_limits<double>::infinity();
};

std::string cut_pattern(const models::ModelPlan& model, const std::vector<plan::LayerRange>& parts) {
  std::string pattern;
  for (const plan::LayerRange& part : parts) {
    if (part.begin > 0) pattern += '|';
    for (int i = part.begin; i < part.end; ++i) pattern += model.blocks[static_cast<std::size_t>(i)].letter;
  }
  return pattern;
}

int run_rank(const std::vector<std::string>& arguments, const fs::path& folder, int steps,
             const fs::path& result) {
  const comm::World world = comm::World::from_env();
  const train::TrainConfig config = train::parse_config("", "partition_bench", arguments).config;
  train::TrainingJob job(world, config, train::open_data(world, config, folder));
  std::vector<double> times;
  for (int step = 0; step < kWarmupSteps + steps; ++step) {
    const train::StepOutcome outcome = job.train_step();
    if (step >= kWarmupSteps) times.push_back(outcome.times.total);
  }
  if (world.rank() == 0) std::ofstream(result) << bench::median(times);
  return 0;
}

int train_both(const std::vector<std::string>& flags, const std::string& letters, int steps, int repeats) {
  std::vector<std::string> whole = flags;
  whole.insert(whole.end(), {"--pattern", letters});
  const train::TrainConfig config = train::parse_config("", "partition_bench", whole).config;
  const models::ModelPlan model = train::configured_plan(config.model);
  const train::PartMeasurements measured =
      train::measure_parts(config, *train::configured_model(config), at::kCPU);
  const auto time = [](const train::PartMeasurement& part) { return part.forward + part.backward; };
  std::vector<double> costs;
  for (const models::BlockPlan& block : model.blocks) costs.push_back(time(measured.blocks.at(block.kind)));
  const plan::PartitionEnds ends{.first = time(measured.embed), .last = time(measured.head)};
  const auto greedy = plan::partition_by_weight(models::block_weights(model), 2);
  const auto best = plan::partition_by_cost(costs, 2, ends);
  std::vector<Split> splits{
      {"greedy by weight", cut_pattern(model, greedy), plan::heaviest(greedy, costs, ends)},
      {"by measured cost", cut_pattern(model, best), plan::heaviest(best, costs, ends)}};
  const fs::path folder = fs::temp_directory_path() / fmt::format("penstock-partition-bench-{}", ::getpid());
  fs::create_directories(folder);
  for (int repeat = 0; repeat < repeats; ++repeat)
    for (Split& split : splits) {
      comm::LaunchOptions options;
      options.ranks = 2;
      const std::string result = (folder / "result").string();
      options.command = {bench::own_path(),     "--worker",  folder.string(), "--result", result, "--steps",
                         std::to_string(steps), "--pattern", split.pattern};
      options.command.insert(options.command.end(), flags.begin(), flags.end());
      for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"})
        options.environment.emplace_back(name, "1");
      if (const int code = comm::launch(options).exit_code; code != 0) return code;
      double seconds = 0;
      std::ifstream(result) >> seconds;
      split.step = std::min(split.step, seconds);
    }
  remove_tree(folder);
  fmt::print("\ntraining on two CPU ranks, 1F1B, best of {} medians of {} steps\n", repeats, steps);
  for (const Split& split : splits)
    fmt::print("  {:<18} {:<20} slowest stage {:>7.2f} ms per microbatch, step {:>8.1f} ms\n", split.title,
               split.pattern, 1e3 * split.slowest, 1e3 * split.step);
  fmt::print("  by cost: slowest stage {:.1f} % lighter, step {:.1f} % shorter\n",
             100 * (1 - splits[1].slowest / splits[0].slowest), 100 * (1 - splits[1].step / splits[0].step));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> flags;
  std::string worker, result, letters = "EEEEAMAMAMAM";
  int steps = 12, repeats = 3;
  bool estimate = false;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&] { return std::string(i + 1 < argc ? argv[++i] : ""); };
    if (flag == "--steps")
      steps = std::stoi(value());
    else if (flag == "--repeats")
      repeats = std::stoi(value());
    else if (flag == "--worker")
      worker = value();
    else if (flag == "--result")
      result = value();
    else if (flag == "--pattern")
      letters = value();
    else if (flag == "--estimate")
      estimate = true;
    else
      flags.push_back(flag);
  }
  if (!worker.empty()) {
    flags.insert(flags.end(), {"--pattern", letters});
    return run_rank(flags, worker, steps, result);
  }
  time_splits();
  const auto preset = [](const std::vector<std::string>& arguments) {
    return train::configured_plan(train::parse_config("", "partition_bench", arguments).config.model);
  };
  compare_estimates("hybrid-52, (AEME)x13", preset({"--preset", "hybrid-52"}));
  compare_estimates("experts first, (EE)x8 (AM)x8, sizes of hybrid-52",
                    preset({"--preset", "hybrid-52", "--pattern", "EEEEEEEEEEEEEEEEAMAMAMAMAMAMAMAM"}));
  if (estimate) return 0;
  const std::vector<std::string> fixed{"--preset",   "hybrid-tiny", "--layout.device", "cpu", "--pp", "2",
                                       "--schedule", "1F1B",        "--experts",       "16"};
  flags.insert(flags.begin(), fixed.begin(), fixed.end());
  return train_both(flags, letters, steps, repeats);
}
