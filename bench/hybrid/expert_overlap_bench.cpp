// What it brings that exchanges of experts run under the computation of the other half of a schedule's unit
// (layout.overlap_experts): the time of a training step with it and without it, in turns in one run, and how
// much of the time of exchanges was hidden.
//
//   expert_overlap_bench                               two processes, each with half of the experts,
//   DualPipeV expert_overlap_bench --pp 2 --microbatches 8       four; further flags are those of penstock
//   train expert_overlap_bench --layout.device cuda          two processes that share a GPU exchange through
//   the host
//
// On the CPU each rank has a thread. PENSTOCK_TRACE=F writes the trace of a step to the file F.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/figures.h"
#include "penstock/base/files.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/config/expert_overlap.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/open_data.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kWarmup = 2, kSteps = 15;

double step_seconds(const comm::World& world, train::TrainingJob& job) {
  world.group().barrier().wait();
  const auto begin = Clock::now();
  job.train_step();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Of the units of the first pipeline rank, in ms: time in exchanges, and that part of it during which the
// other half computed.
std::pair<double, double> exchange_times(const StepTrace& trace) {
  double all = 0, hidden = 0;
  for (const TraceEvent& unit : trace.ranks[0])
    for (const UnitPiece& exchange : unit.pieces) {
      if (exchange.kind != UnitPiece::Kind::Exchange) continue;
      all += static_cast<double>(exchange.end_ns - exchange.begin_ns) / 1e6;
      for (const UnitPiece& piece : unit.pieces)
        if (piece.kind == UnitPiece::Kind::Compute && piece.member != exchange.member)
          hidden += std::max(0.0, static_cast<double>(std::min(piece.end_ns, exchange.end_ns) -
                                                      std::max(piece.begin_ns, exchange.begin_ns)) /
                                      1e6);
    }
  return {all, hidden};
}

int run_rank(const std::vector<std::string>& flags, const fs::path& folder) {
  const comm::World world = comm::World::from_env();
  const train::TrainConfig config = train::parse_config("", "expert_overlap_bench", flags).config;
  train::TrainConfig apart = config;
  apart.layout.overlap_experts = "off";
  const train::TrainingData data = train::open_data(world, config, folder);
  train::TrainingJob overlapped(world, config, data), plain(world, apart, data);
  for (int step = 0; step < kWarmup; ++step) {
    plain.train_step();
    overlapped.train_step();
  }
  std::vector<double> with, without, ratios;
  for (int step = 0; step < kSteps; ++step) {
    without.push_back(step_seconds(world, plain));
    with.push_back(step_seconds(world, overlapped));
    ratios.push_back(with.back() / without.back());
  }
  const int exchanges = overlapped.pipeline().report().overlapped_exchanges;
  const std::optional<StepTrace> trace = trace_last_step(overlapped.pipeline(), false);
  if (world.rank() != 0) return 0;
  const auto [all, hidden] = exchange_times(*trace);
  fmt::print("{}\n", train::ExpertOverlap(config.layout, train::configured_schedule(config.layout)).text());
  fmt::print("step without overlap {:.1f} ms, with overlap {:.1f} ms, ratio {:.3f}\n",
             1e3 * bench::median(without), 1e3 * bench::median(with), bench::median(ratios));
  fmt::print(
      "{} exchanges of rank 0 overlapped; of {:.1f} ms in exchanges of units {:.1f} ms ({:.0f} %) were under "
      "the "
      "computation of the other half\n",
      exchanges, all, hidden, 100 * hidden / all);
  if (const char* path = std::getenv("PENSTOCK_TRACE")) write_trace(*trace, path);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string own = "--worker";
  if (argc > 2 && argv[1] == own) return run_rank({argv + 3, argv + argc}, argv[2]);
  std::vector<std::string> flags(argv + 1, argv + argc);
  const std::pair<const char*, const char*> defaults[] = {{"--preset", "hybrid-tiny"},
                                                          {"--pattern", "AEMEAEME"},
                                                          {"--experts", "16"},
                                                          {"--pp", "1"},
                                                          {"--virtual_stages", "2"},
                                                          {"--dp", "2"},
                                                          {"--ep", "2"},
                                                          {"--schedule", "DualPipeV"},
                                                          {"--layout.device", "cpu"}};
  for (const auto& [key, value] : defaults)
    if (std::find(argv + 1, argv + argc, std::string_view(key)) == argv + argc)
      flags.insert(flags.end(), {key, value});
  const fs::path folder = fs::temp_directory_path() / fmt::format("penstock-overlap-bench-{}", ::getpid());
  fs::create_directories(folder);
  comm::LaunchOptions options;
  options.ranks =
      static_cast<int>(train::parse_config("", "expert_overlap_bench", flags).config.layout.ranks);
  options.command = {fs::read_symlink("/proc/self/exe").string(), own, folder.string()};
  options.command.insert(options.command.end(), flags.begin(), flags.end());
  for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
    options.environment.emplace_back(name, "1");
  const int code = comm::launch(options).exit_code;
  remove_tree(folder);
  return code;
}
