// What shared parameters cost: the time to add the gradients of a tied embedding and of a table of relation
// biases over the stages of a pipeline of two processes, as a share of a training step.
//
//   tie_bench                                          hybrid-tiny, 1F1B: embedding and head on two ranks
//   tie_bench --model.width 256                        further flags are those of penstock train
//
// In V schedules both uses of the embedding are on one rank and need no communication. Each rank has a core.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "penstock/base/files.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/shared_parameters.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/job/open_data.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kWarmup = 3, kSteps = 20, kSums = 100;

double median_seconds(const comm::World& world, int times, const std::function<void()>& work) {
  std::vector<double> seconds;
  for (int i = 0; i < times; ++i) {
    world.group().barrier().wait();  // not the imbalance of the stages
    const auto begin = Clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + times / 2, seconds.end());
  return seconds[static_cast<std::size_t>(times / 2)];
}

int run_rank(const std::vector<std::string>& flags, const fs::path& folder) {
  const comm::World world = comm::World::from_env();
  const train::TrainConfig config = train::parse_config("", "tie_bench", flags).config;
  train::TrainingJob job(world, config, train::open_data(world, config, folder));
  for (int step = 0; step < kWarmup; ++step) job.train_step();
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(static_cast<std::size_t>(world.local_rank()), &core);
  ::sched_setaffinity(0, sizeof core, &core);
  const double step = median_seconds(world, kSteps, [&] { job.train_step(); });

  // Copies with the shapes of the job's own, so that its training is not disturbed.
  std::vector<ParameterUse> uses;
  std::vector<ParameterTie> ties;
  const auto measure = [&](const std::vector<std::string>& names) {
    uses.clear();
    ties.clear();
    std::int64_t elements = 0;
    for (const std::string& name : names) ties.push_back(tie({name}));
    for (const PipelineStage& stage : job.model().stages())
      for (const optim::NamedParameter& each : job.model().parameters_of(stage.index()))
        if (std::find(names.begin(), names.end(), each.name) != names.end()) {
          uses.push_back(
              {each.name, stage.index(), at::randn_like(each.tensor.detach()).set_requires_grad(true)});
          elements += each.tensor.numel();
        }
    SharedParameters shared(ties, uses, {world});
    const double sum = median_seconds(world, kSums, [&] {
      for (const ParameterUse& use : uses)
        if (!use.parameter.grad().defined())
          use.parameter.mutable_grad() = at::ones_like(use.parameter.detach());
      shared.sum_gradients();
    });
    if (world.rank() == 0) {
      for (const std::string& line : shared.report()) fmt::print("{}\n", line);
      fmt::print("{:<32} {:>9} elements {:>9.3f} ms {:>7.2f} % of a step of {:.1f} ms\n",
                 names.size() == 1 ? names.front() : "both", elements, 1e3 * sum, 100 * sum / step,
                 1e3 * step);
    }
  };
  measure({"embed.weight"});
  measure({"relations.weight"});
  measure({"embed.weight", "relations.weight"});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string own = "--worker";
  if (argc > 2 && argv[1] == own) return run_rank({argv + 3, argv + argc}, argv[2]);
  const fs::path folder = fs::temp_directory_path() / fmt::format("penstock-tie-bench-{}", ::getpid());
  fs::create_directories(folder);
  comm::LaunchOptions options;
  options.ranks = 2;
  options.command = {fs::read_symlink("/proc/self/exe").string(),
                     own,
                     folder.string(),
                     "--preset",
                     "hybrid-tiny",
                     "--tie_head",
                     "true",
                     "--relations",
                     "4",
                     "--pattern",
                     "AEAE",
                     "--pp",
                     "2",
                     "--virtual_stages",
                     "1",
                     "--schedule",
                     "1F1B",
                     "--layout.device",
                     "cpu"};
  options.command.insert(options.command.end(), argv + 1, argv + argc);
  for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
    options.environment.emplace_back(name, "1");
  const int code = comm::launch(options).exit_code;
  remove_tree(folder);
  return code;
}
