// A training step of an eight-block transformer over two ranks, each a process on its own core: Penstock, and
// optionally Python.
//
//   pipeline_bench                                                    several schedules, d = 32 and 256
//   pipeline_bench --peer "python3 bench/pipeline_peer.py"
//       compared with the peer: medians, ratios, loss and gradient norm
//   pipeline_bench --d 256 --schedule ZBVZeroBubble --repeats 5 --p2p ucx
//   pipeline_bench --d 256 --schedule 1F1B --trace step.json
//       also writes the last step, for penstock trace and Perfetto
//   pipeline_bench --schedule ZBVZeroBubble --linear captured --beside plain
//       in turns with another way to run the stages: both medians, their ratio, and that of the CPU time
//
// --linear: "joined" computes the weight gradients of linear layers for all microbatches at once
// (StageOptions::join_weight_gradients), "deferred" those of each microbatch in its weight pass, "plain"
// leaves them to autograd, "captured" replays stages as graphs (graph::compile), whose backward consists of
// two graphs if the schedule splits it.
// Efficiency is the simulated time of the step, from the medians of its own actions, divided by the measured
// time. "one process" is a plain loop over the microbatches on one core. Penstock and the peer run
// alternately; the result is the median over the repeats of each run's median step. Export OMP_NUM_THREADS=1
// and OPENBLAS_NUM_THREADS=1. The ranks get the variables that `penstock launch` sets. Times depend on the
// machine; compare ratios.
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>

#include "bench/block.h"
#include "bench/figures.h"
#include "penstock/base/env.h"
#include "penstock/compile.h"
#include "penstock/deferred_linear.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/report/trace_comparison.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "penstock/torch/compat/version.h"

namespace {

using namespace penstock;
using namespace penstock::bench;

constexpr int kBlocks = 8, kWarmup = 3;

struct Config {
  std::string schedule = "1F1B";
  int d = 256, mb = 1, nmb = 8, steps = 15;
  std::string p2p = "auto";
  std::string linear = "joined";
  std::string trace;
};

at::Tensor through_deferred(torch::nn::Linear& layer, const at::Tensor& x) {
  return deferred_linear(x, layer->weight, layer->bias);
}

// The blocks of a stage, as one module.
struct BlocksImpl : torch::nn::Module {
  explicit BlocksImpl(std::vector<Block> given) : blocks(std::move(given)) {
    for (std::size_t i = 0; i < blocks.size(); ++i) register_module(std::to_string(i), blocks[i]);
  }
  at::Tensor forward(at::Tensor x) {
    for (Block& block : blocks) x = block->forward(x);
    return x;
  }
  std::vector<Block> blocks;
};

StageModule captured(std::vector<Block> blocks, bool split) {
  const auto module =
      graph::compile(std::make_shared<BlocksImpl>(std::move(blocks)), {.split_backward = split});
  return StageModule([module](const at::Tensor& x) { return module->forward(x); }, {module});
}

bool splits_backward(schedule::ScheduleKind kind, int stages_per_rank, int nmb) {
  const schedule::Schedule whole = schedule::generate(
      kind, {.ranks = 2, .stages_per_rank = stages_per_rank, .microbatches = nmb, .group_size = {}});
  for (const schedule::Row& row : whole.rows())
    for (const schedule::Slot slot : row)
      for (const schedule::Action& action : slot)
        if (action.kind() == schedule::ActionKind::BackwardWeight) return true;
  return false;
}

std::vector<Block> make_blocks(const Config& config, bool deferred) {
  torch::manual_seed(0);
  std::vector<Block> blocks;
  for (int i = 0; i < kBlocks; ++i)
    blocks.emplace_back(config.d, deferred ? &through_deferred : &through_layer);
  return blocks;
}

std::pair<at::Tensor, at::Tensor> make_batch(const Config& config) {
  const at::Generator generator = at::detail::createCPUGenerator(1);
  at::Tensor x = torch::randn({config.mb * config.nmb, kSequence, config.d}, generator);
  return {std::move(x), torch::randn({config.mb * config.nmb, kSequence, config.d}, generator)};
}

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

void say(const std::vector<double>& times, double loss, double norm, double efficiency, double cpu_ms = 0) {
  fmt::print("step_ms {:.3f} loss {:.6f} norm {:.6f} efficiency {:.4f} cpu_ms {:.3f}\n", median(times), loss,
             norm, efficiency, cpu_ms);
  std::fflush(stdout);
}

int run_one_process(const Config& config) {
  at::set_num_threads(1);
  pin(0);
  std::vector<Block> blocks = make_blocks(config, false);
  std::vector<at::Tensor> parameters;
  for (const Block& block : blocks)
    for (const at::Tensor& parameter : block->parameters()) parameters.push_back(parameter);
  const auto [x, target] = make_batch(config);
  std::vector<double> times;
  double loss = 0;
  for (int step = 0; step < kWarmup + config.steps; ++step) {
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor();
    const auto begin = std::chrono::steady_clock::now();
    const auto xs = x.chunk(config.nmb), targets = target.chunk(config.nmb);
    std::vector<at::Tensor> losses;
    for (std::size_t m = 0; m < xs.size(); ++m) {
      at::Tensor y = xs[m];
      for (Block& block : blocks) y = block->forward(y);
      losses.push_back(loss_of(y, targets[m]));
      losses.back().backward();
      losses.back() = losses.back().detach();
    }
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().div_(config.nmb);
    if (step >= kWarmup)
      times.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    loss = at::stack(losses).mean().item<double>();
  }
  double norm = 0;
  for (const at::Tensor& parameter : parameters)
    norm += parameter.grad().to(at::kDouble).pow(2).sum().item<double>();
  say(times, loss, std::sqrt(norm), 1);
  return 0;
}

// One rank of one run; rank 0 prints the line that the parent reads.
int run_rank(const Config& config) {
  at::set_num_threads(1);
  comm::World world = comm::World::from_env();
  const auto kind = schedule::schedule_kind(config.schedule);
  const int per_rank = schedule::required_stages_per_rank(kind).value_or(2);
  const int count = per_rank * world.size();

  const std::vector<Block> blocks =
      make_blocks(config, config.linear == "joined" || config.linear == "deferred");
  std::vector<PipelineStage> stages;
  const auto mine = schedule::rank_to_stages(schedule::placement_of(kind), world.size(),
                                             count)[static_cast<std::size_t>(world.rank())];
  for (const int index : mine) {
    const std::vector<Block> own(blocks.begin() + index * kBlocks / count,
                                 blocks.begin() + (index + 1) * kBlocks / count);
    StageOptions how;
    how.join_weight_gradients = config.linear == "joined";
    if (config.linear == "captured") {
      const at::Tensor example =
          at::empty({config.mb, kSequence, config.d});  // shapes are known: no trial run
      how.input_args = how.output_args = std::vector<at::Tensor>{example};
      how.output_args->front() = example.clone().requires_grad_();
      if (index > 0) how.input_args = how.output_args;
      stages.emplace_back(captured(own, splits_backward(kind, per_rank, config.nmb)), index, count, at::kCPU,
                          how);
      continue;
    }
    stages.emplace_back(StageModule::chain({own.begin(), own.end()}), index, count, at::kCPU, how);
  }
  PipelineOptions options{world};
  options.p2p = config.p2p == "ucx"    ? comm::P2PTransport::Ucx
                : config.p2p == "gloo" ? comm::P2PTransport::Gloo
                                       : comm::P2PTransport::Auto;
  PipelineRuntime pipeline = make_pipeline(config.schedule, stages, config.nmb, &loss_of, options);
  // After the groups are created, so that their threads stay unpinned.
  pin(world.rank());

  const auto [x, target] = make_batch(config);
  std::vector<double> times, efficiencies;
  StepResult result;
  std::clock_t cpu = 0;
  for (int step = 0; step < kWarmup + config.steps; ++step) {
    if (step == kWarmup) cpu = std::clock();
    for (const PipelineStage& stage : stages)
      for (const at::Tensor& parameter : stage.parameters()) parameter.mutable_grad() = at::Tensor();
    world.group().barrier().wait();
    const auto begin = std::chrono::steady_clock::now();
    result = pipeline.step(Tree::tuple({x}), {}, target);
    world.group().barrier().wait();
    if (step < kWarmup) continue;
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    if (const auto trace = trace_last_step(pipeline))
      efficiencies.push_back(compare_with_simulation(*trace).efficiency());
  }
  if (!config.trace.empty()) pipeline.write_trace(config.trace);
  at::Tensor sums = at::zeros({3}, at::kDouble);
  sums[2] = 1e3 * static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC / config.steps;
  for (const PipelineStage& stage : stages)
    for (const at::Tensor& parameter : stage.parameters())
      sums[0] += parameter.grad().to(at::kDouble).pow(2).sum();
  if (!result.losses.empty()) sums[1] = at::stack(result.losses).mean();
  world.group().all_reduce(sums).wait();
  if (world.rank() == 0)
    say(times, sums[1].item<double>(), std::sqrt(sums[0].item<double>()), median(efficiencies),
        sums[2].item<double>());
  return 0;
}

std::string flags(const Config& config) {
  return fmt::format("--schedule {} --d {} --mb {} --nmb {} --steps {}", config.schedule, config.d, config.mb,
                     config.nmb, config.steps);
}

Figure run_ours(const Config& config, int port) {
  if (config.schedule == "one process")
    return read_figure(fmt::format("'{}' --alone --d {} --mb {} --nmb {} --steps {}", own_path(), config.d,
                                   config.mb, config.nmb, config.steps));
  return read_figure(
      launch_command(2, port,
                     fmt::format("--rank {} --p2p {} --linear {}{}", flags(config), config.p2p, config.linear,
                                 config.trace.empty() ? "" : " --trace '" + config.trace + "'")));
}

}  // namespace

int main(int argc, char** argv) {
  Config config;
  bool is_rank = false, alone = false, all_d = true, all_schedules = true;
  int repeats = 3;
  std::string peer, beside;
  const std::map<std::string, int*> numbers{{"--d", &config.d},
                                            {"--mb", &config.mb},
                                            {"--nmb", &config.nmb},
                                            {"--steps", &config.steps},
                                            {"--repeats", &repeats}};
  const std::map<std::string, std::string*> texts{{"--schedule", &config.schedule},
                                                  {"--p2p", &config.p2p},
                                                  {"--linear", &config.linear},
                                                  {"--peer", &peer},
                                                  {"--beside", &beside},
                                                  {"--trace", &config.trace}};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--rank") {
      is_rank = true;
    } else if (flag == "--alone") {
      alone = true;
    } else if (i + 1 < argc && numbers.contains(flag)) {
      *numbers.at(flag) = std::atoi(argv[++i]);
      if (flag == "--d") all_d = false;
    } else if (i + 1 < argc && texts.contains(flag)) {
      *texts.at(flag) = argv[++i];
      if (flag == "--schedule") all_schedules = false;
    } else {
      fmt::print(
          "usage: pipeline_bench [--schedule NAME] [--d N] [--mb N] [--nmb N] [--steps N] [--repeats N] "
          "[--p2p auto|gloo|ucx] [--linear joined|deferred|plain|captured] [--beside LINEAR] [--trace FILE] "
          "[--peer "
          "\"python3 bench/pipeline_peer.py\"]\n");
      return flag == "--help" ? 0 : 2;
    }
  }
  if (alone) return run_one_process(config);
  if (is_rank) return run_rank(config);
  fmt::print("LibTorch {}, 2 ranks, mb {}, nmb {}, {} transfers, {} linear layers; median step in ms\n",
             torch_version(), config.mb, config.nmb, config.p2p, config.linear);
  fmt::print("{:<22} {:>4} {:>9} {:>10}{}{}\n", "schedule", "d", "ours", "efficiency",
             peer.empty() ? "" : "      peer   ratio   loss and norm",
             beside.empty() ? "" : fmt::format("  {:>9}   ratio   CPU time   loss and norm", beside));
  int port = 29700 + static_cast<int>(getpid() % 200);
  for (const int d : all_d ? std::vector<int>{32, 256} : std::vector<int>{config.d}) {
    std::vector<std::string> schedules{
        "one process",           "GPipe",         "1F1B",     "Interleaved1F1B",
        "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"};
    if (!all_schedules) schedules = {config.schedule};
    for (const std::string& name : schedules) {
      Config each = config;
      each.d = d;
      each.schedule = name;
      std::vector<double> ours, theirs, efficiencies, second, cpu, second_cpu;
      Figure mine, other, next;
      for (int repeat = 0; repeat < repeats; ++repeat) {
        mine = run_ours(each, ++port);
        ours.push_back(mine["step_ms"]);
        efficiencies.push_back(mine["efficiency"]);
        if (!beside.empty() && name != "one process") {
          Config with = each;
          with.linear = beside;
          next = run_ours(with, ++port);
          second.push_back(next["step_ms"]);
          cpu.push_back(mine["cpu_ms"]);
          second_cpu.push_back(next["cpu_ms"]);
        }
        if (peer.empty() || name == "one process") continue;
        other = read_figure(fmt::format("{} {} --port {}", peer, flags(each), ++port));
        theirs.push_back(other["step_ms"]);
      }
      fmt::print("{:<22} {:>4} {:>9.2f} {:>10.3f}", name, d, median(ours), median(efficiencies));
      if (!theirs.empty())
        fmt::print(" {:>9.2f}  {:>6.3f}   {}", median(theirs), median(ours) / median(theirs),
                   same_training(mine, other));
      if (!second.empty())
        fmt::print("  {:>9.2f}  {:>6.3f}     {:>6.3f}   {}", median(second), median(ours) / median(second),
                   median(cpu) / median(second_cpu), same_training(mine, next));
      fmt::print("\n");
      std::fflush(stdout);
    }
  }
  return 0;
}
