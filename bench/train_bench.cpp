// Training as in `penstock train`, in several layouts on one machine, run alternately: tokens per second and
// the overhead of the trainer.
//
//   train_bench
//       hybrid-tiny on the CPU: one process on one core, one with two threads, and a pipeline of two
//   train_bench --schedule 1F1B,ZBVZeroBubble --steps 30
//       a pipeline for each schedule; further flags are those of penstock train
//   train_bench --neighbours 1
//       the same next to processes that keep a core busy; nothing is pinned then
//   train_bench --device cuda --preset gpt2-124m --microbatches 1 --microbatch_size 32
//
//   train_bench --training.compile off,graph,fused   each layout without and with captured graphs, and with
//   generated code; "graph/off" and "fused/off" are the ratios of their steps. The rate of each kernel beside
//   that of a copy is printed by `penstock inspect graph --kernels`
//
// "outside" is the share of a step outside the schedule: data, sums over ranks, clipping and the optimizer.
// On the CPU each rank of a layout has its own core. Times depend on the machine; compare ratios.
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <torch/cuda.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/env.h"
#include "penstock/base/files.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/open_data.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
namespace fs = std::filesystem;

constexpr int kWarmup = 4;

struct Setup {
  std::string title;
  std::vector<std::string> layout;
  int ranks = 1;
  int threads = 1;
};

// Pins the computing thread. Call it after the threads of groups have been created, so that those stay
// unpinned.
void pin(int first, int count) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int core = first; core < first + count; ++core) CPU_SET(static_cast<std::size_t>(core), &cores);
  ::sched_setaffinity(0, sizeof cores, &cores);
}

// Processes that each keep a core busy until the object is destroyed.
class Neighbours {
 public:
  explicit Neighbours(int count) {
    for (int i = 0; i < count; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        volatile unsigned spins = 0;
        while (true) spins = spins + 1;
      }
      children_.push_back(child);
    }
  }
  ~Neighbours() {
    for (const pid_t child : children_) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
  }
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

 private:
  std::vector<pid_t> children_;
};

// One rank of a setup; rank 0 writes the results.
int run_rank(const std::vector<std::string>& arguments, const fs::path& folder, int threads, int steps,
             bool pinned, const fs::path& result) {
  const comm::World world = comm::World::from_env();
  const train::TrainConfig config = train::parse_config("", "train_bench", arguments).config;
  train::TrainingJob job(world, config, train::open_data(world, config, folder));
  std::vector<double> totals, outside;
  double loss = 0;
  for (int step = 0; step < kWarmup + steps; ++step) {
    if (step == kWarmup && pinned && config.layout.device == "cpu")
      pin(world.local_rank() * threads, threads);
    const train::StepOutcome outcome = job.train_step();
    loss = outcome.loss;
    if (step < kWarmup) continue;
    totals.push_back(outcome.times.total);
    outside.push_back(1 - outcome.times.schedule / outcome.times.total);
  }
  if (world.rank() != 0) return 0;
  const auto median = [](std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                     values.end());
    return values[values.size() / 2];
  };
  std::ofstream(result) << nlohmann::json{{"step_s", median(totals)},
                                          {"outside", median(outside)},
                                          {"tokens", job.tokens_per_step()},
                                          {"loss", loss}};
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> flags;
  int steps = 15, repeats = 3, threads = 1, neighbours = 0;
  std::string worker, result, device = "cpu", schedules = "1F1B", compiles = "off";
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&] { return std::string(i + 1 < argc ? argv[++i] : ""); };
    if (flag == "--steps")
      steps = std::stoi(value());
    else if (flag == "--repeats")
      repeats = std::stoi(value());
    else if (flag == "--threads")
      threads = std::stoi(value());
    else if (flag == "--neighbours")
      neighbours = std::stoi(value());
    else if (flag == "--worker")
      worker = value();
    else if (flag == "--result")
      result = value();
    else if (flag == "--device")
      device = value();
    else if (flag == "--schedule" && worker.empty())
      schedules = value();
    else if ((flag == "--compile" || flag == "--training.compile") && worker.empty())
      compiles = value();
    else
      flags.push_back(flag);
  }
  if (!worker.empty()) return run_rank(flags, worker, threads, steps, neighbours == 0, result);

  flags.insert(flags.end(), {"--layout.device", device});
  const std::vector<std::string> alone_flags{"--pp", "1", "--virtual_stages", "0", "--schedule", "1F1B"};
  std::vector<Setup> setups{{"one process, one thread", alone_flags, 1, 1}};
  if (device == "cpu") {
    setups.push_back({"one process, two threads", alone_flags, 1, 2});
    std::stringstream names(schedules);
    for (std::string name; std::getline(names, name, ',');)
      setups.push_back({"two, " + name, {"--pp", "2", "--schedule", name}, 2, 1});
  }
  std::vector<Setup> plain = std::exchange(setups, {});
  for (const Setup& each : plain) {
    std::stringstream names(compiles);
    for (std::string name; std::getline(names, name, ',');) {
      Setup setup = each;
      if (name != "off") setup.title += ", " + name;
      setup.layout.insert(setup.layout.end(), {"--training.compile", name});
      setups.push_back(std::move(setup));
    }
  }
  const fs::path folder = fs::temp_directory_path() / fmt::format("penstock-train-bench-{}", ::getpid());
  fs::create_directories(folder);
  std::map<std::string, std::vector<nlohmann::json>> seen;
  const Neighbours busy(neighbours);
  for (int repeat = 0; repeat < repeats; ++repeat)
    for (const Setup& setup : setups) {
      comm::LaunchOptions options;
      options.ranks = setup.ranks;
      const std::string out = (folder / "result.json").string();
      options.command = {fs::read_symlink("/proc/self/exe").string(),
                         "--worker",
                         folder.string(),
                         "--result",
                         out,
                         "--threads",
                         std::to_string(setup.threads),
                         "--steps",
                         std::to_string(steps),
                         "--neighbours",
                         std::to_string(neighbours)};
      options.command.insert(options.command.end(), flags.begin(), flags.end());
      options.command.insert(options.command.end(), setup.layout.begin(), setup.layout.end());
      for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
        options.environment.emplace_back(name, std::to_string(setup.threads));
      if (const int code = comm::launch(options).exit_code; code != 0) return code;
      seen[setup.title].push_back(nlohmann::json::parse(std::ifstream(out)));
    }
  remove_tree(folder);
  const auto best = [&](const std::string& title) {
    return *std::min_element(seen[title].begin(), seen[title].end(), [](const auto& a, const auto& b) {
      return a.at("step_s").template get<double>() < b.at("step_s").template get<double>();
    });
  };
  const double alone = best(setups[0].title).at("step_s");
  fmt::print("{:<26} {:>10} {:>12} {:>8} {:>9} {:>9}\n", "best of the repeats", "step ms", "tokens/s",
             "ratio", "outside", "loss");
  for (const Setup& setup : setups) {
    const nlohmann::json row = best(setup.title);
    const double seconds = row.at("step_s");
    fmt::print("{:<26} {:>10.1f} {:>12.0f} {:>8.2f} {:>8.1f}% {:>9.5f}\n", setup.title, 1e3 * seconds,
               row.at("tokens").get<double>() / seconds, alone / seconds,
               100 * row.at("outside").get<double>(), row.at("loss").get<double>());
  }
  for (const Setup& setup : plain)
    for (const char* compiled : {"graph", "fused"})
      if (const std::string title = fmt::format("{}, {}", setup.title, compiled);
          seen.contains(setup.title) && seen.contains(title))
        fmt::print("{}/off, {}: {:.3f}\n", compiled, setup.title,
                   best(title).at("step_s").get<double>() / best(setup.title).at("step_s").get<double>());
  return 0;
}
