// The cost of capture and replay, for transformers of 1, 4, 12 and 48 layers: microseconds per node for each
// step from a module to a graph, and the replayed training step compared with the same step run eagerly and
// with dynamic dims; optionally Python's AOT autograd.
//
//   graph_bench                                                  width 32
//   graph_bench --peer "python3 bench/graph/graph_peer.py"       compared with the peer: capture, replay,
//                                                                loss and gradient norm
//   graph_bench --width 256 --layers 12 --repeats 20
//   graph_bench --device cuda --width 768 --layers 12
//
// "In shape" is forward and backward over fake tensors without recording; the additional cost of a capture is
// the recording. Capture figures are the minimum of several runs for Penstock and the median for the peer;
// steps are medians, alternating with the eager step; on a busy machine, the ratio of CPU time is the one to
// read. "peak" is the peak tensor memory of a replayed step
// relative to an eager one. Lines "budget" are steps with activation budgets (CompileOptions::activations)
// beside the eager step; "kept" is what forward leaves for backward. Export OMP_NUM_THREADS=1.
#include <fmt/format.h>
#include <malloc.h>
#include <time.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/graph/model_function.h"
#include "penstock/compile.h"
#include "penstock/fake.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/passes/pass_list.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/trace/fake_in_place.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/torch/compat/device_memory.h"
#include "penstock/torch/compat/version.h"

namespace {

using namespace penstock;
using namespace penstock::graph;
using namespace penstock::bench;

struct Config {
  int width = 32, batch = 4, repeats = 7, steps = 10;
  std::vector<int> layers{1, 4, 12, 48};
  std::string device = "cpu", peer;
};

// The minimum of several runs, in microseconds; `prepare` runs before each and is not counted.
double least_us(
    int runs, const std::function<void()>& work, const std::function<void()>& prepare = [] {}) {
  double best = 1e30;
  for (int i = 0; i < runs; ++i) {
    prepare();
    const auto begin = Clock::now();
    work();
    best = std::min(best, 1e3 * ms_since(begin));
  }
  return best;
}

class Measured {
 public:
  Measured(const Config& config, int layers)
      : config_(config), layers_(layers), model_(config.width, layers) {
    const at::Device device(config.device);
    model_->to(device);
    const at::Generator generator = at::detail::createCPUGenerator(1);
    x_ = torch::randn({config.batch, kSequence, config.width}, generator).to(device);
    target_ = torch::randn({config.batch, kSequence, config.width}, generator).to(device);
  }

  // Returns the total time of a capture in microseconds.
  double capture() {
    const ModelFunction step(model_, x_, target_);

    const double in_shape = least_us(config_.repeats, [&] {
      FakeMode mode;
      const FakeInPlace parameters(step.state.tensors);
      const at::Tensor x = to_fake(x_), target = to_fake(target_);
      const ModeGuard guard(mode);
      torch::autograd::grad({model_->forward(x, target)}, model_->parameters());
    });
    JointGraph joint;
    const double captured_us = least_us(
        config_.repeats,
        [&] {
          joint = *analyze_and_capture(step.function, step.inputs, {.convention = step.convention}).joint;
        },
        [&] { joint = {}; });
    const auto nodes = static_cast<double>(joint.graph.nodes.size());
    const JointGraph captured = joint;
    const double functional = least_us(
        config_.repeats,
        [&] {
          joint.graph = functionalize(std::move(joint.graph), joint.forward_outputs);
          remove_dead_nodes(joint.graph);
        },
        [&] { joint = captured; });
    Partition halves;
    const double split = least_us(
        config_.repeats, [&] { halves = partition_default(joint); }, [&] { halves = {}; });
    compare_executors(halves.forward, step.inputs);
    const double passes = time_passes(joint);
    const double all = captured_us + functional + passes + split;
    fmt::print(
        "{:3} layers, {:5} nodes, us/node: in shape {:5.2f}, recording {:5.2f}; analysis and capture "
        "{:5.2f}, functionalize {:5.2f}, "
        "passes {:5.2f}, partition {:5.2f}, together {:5.2f}\n",
        layers_, joint.graph.nodes.size(), in_shape / nodes, (captured_us - in_shape) / nodes,
        captured_us / nodes, functional / nodes, passes / nodes, split / nodes, all / nodes);
    return all;
  }

  // All passes, on the joint graph and on its halves; prints each one alone. In microseconds.
  double time_passes(const JointGraph& joint) {
    const auto time = [&](const PassList& passes) {
      Graph graph;
      const double of_joint = least_us(
          config_.repeats, [&] { graph = passes.run(std::move(graph), {.role = PassRole::Joint}); },
          [&] { graph = joint.graph; });
      Partition halves;
      return of_joint +
             least_us(
                 config_.repeats,
                 [&] {
                   halves.forward = passes.run(std::move(halves.forward), {.role = PassRole::Forward});
                   halves.backward = passes.run(std::move(halves.backward), {.role = PassRole::Backward});
                 },
                 [&] { halves = partition_default(joint); });
    };
    const PassList all;
    fmt::print("{:3} layers, passes, us/node:", layers_);
    for (const auto& pass : all.passes())
      fmt::print(" {} {:.3f}", pass->name(),
                 time(PassList({pass}, false)) / static_cast<double>(joint.graph.nodes.size()));
    const Graph after = all.run(joint.graph, {.role = PassRole::Joint});
    fmt::print("; {} nodes become {}\n", joint.graph.nodes.size(), after.nodes.size());
    return time(all);
  }

  // Loss, gradient norm, and medians of the replayed and the eager step.
  Figure steps() {
    const auto fast = compile(model_);
    const auto eager = [&] { return model_->forward(x_, target_); };
    const auto replayed = [&] { return fast->forward(x_, target_); };
    const auto dynamic = compile(
        model_,
        {.dynamic = {
             .dims = {{"args[0]", 0, "B"}, {"args[0]", 1, "T"}, {"args[1]", 0, "B"}, {"args[1]", 1, "T"}}}});
    const auto plain_graph = compile(model_, {.disable_passes = graph_pass_names()});
    const auto without_passes = [&] { return plain_graph->forward(x_, target_); };
    const auto replayed_dynamic = [&] { return dynamic->forward(x_, target_); };
    const double all_sizes_ms = step(replayed_dynamic).ms;
    for (int i = 0; i < 3; ++i) step(eager), step(replayed), step(replayed_dynamic), step(without_passes);
    std::vector<double> eager_ms, replayed_ms, dynamic_ms, eager_cpu_ms, replayed_cpu_ms, without_cpu_ms;
    Figure figure;
    for (int i = 0; i < config_.steps; ++i) {
      const Step plain = step(eager), fixed = step(replayed);
      eager_ms.push_back(plain.ms);
      eager_cpu_ms.push_back(plain.cpu_ms);
      replayed_ms.push_back(fixed.ms);
      replayed_cpu_ms.push_back(fixed.cpu_ms);
      without_cpu_ms.push_back(step(without_passes).cpu_ms);
      figure["loss"] = fixed.loss;
      dynamic_ms.push_back(step(replayed_dynamic).ms);
    }
    double norm = 0;
    for (const at::Tensor& parameter : model_->parameters())
      norm += parameter.grad().to(at::kDouble).pow(2).sum().item<double>();
    figure["norm"] = std::sqrt(norm);
    figure["eager_ms"] = median(eager_ms);
    figure["step_ms"] = median(replayed_ms);
    figure["peak"] = peak_of(replayed) / peak_of(eager);
    fmt::print(
        "    step, width {}: eager {:.2f} ms, replayed {:.2f} ms, ratio {:.3f}, peak {:.3f}; of CPU time "
        "{:.3f}, of its least {:.3f}; to a replay without passes {:.3f}, of its least {:.3f}\n",
        config_.width, figure["eager_ms"], figure["step_ms"], figure["step_ms"] / figure["eager_ms"],
        figure["peak"], median(replayed_cpu_ms) / median(eager_cpu_ms),
        least_of(replayed_cpu_ms) / least_of(eager_cpu_ms), median(replayed_cpu_ms) / median(without_cpu_ms),
        least_of(replayed_cpu_ms) / least_of(without_cpu_ms));
    fmt::print(
        "    dynamic batch and length: replayed {:.2f} ms, ratio to fixed sizes {:.3f}, of the least {:.3f}; "
        "captured in {:.0f} ms, {} capture\n",
        median(dynamic_ms), median(dynamic_ms) / figure["step_ms"],
        least_of(dynamic_ms) / least_of(replayed_ms), all_sizes_ms, dynamic->captures());
    return figure;
  }

  // Activation budgets beside the eager step, all in turns: time, what forward keeps for backward, and the
  // peak of the step.
  void budgets() {
    struct Way {
      std::string name;
      std::function<at::Tensor()> call;
      std::vector<double> ms, cpu_ms;
    };
    std::vector<Way> ways;
    ways.push_back({"eager", [&] { return model_->forward(x_, target_); }, {}, {}});
    for (const char* budget : {"1", "0.7", "0.5", "0.3"}) {
      const auto fast = compile(model_, {.activations = {.budget = budget}});
      ways.push_back(
          {fmt::format("budget {}", budget), [=, this] { return fast->forward(x_, target_); }, {}, {}});
    }
    for (int i = 0; i < 2 + config_.steps; ++i)
      for (Way& way : ways) {
        const Step done = step(way.call);
        if (i < 2) continue;  // captured and warm
        way.ms.push_back(done.ms);
        way.cpu_ms.push_back(done.cpu_ms);
      }
    const double kept = kept_of(ways[0].call), peak = peak_of(ways[0].call);
    for (std::size_t i = 1; i < ways.size(); ++i)
      fmt::print(
          "    {}: to eager, time {:.3f}, of its least {:.3f}, CPU time {:.3f}, of its least {:.3f}, kept "
          "after "
          "forward {:.3f}, peak {:.3f}\n",
          ways[i].name, median(ways[i].ms) / median(ways[0].ms), least_of(ways[i].ms) / least_of(ways[0].ms),
          median(ways[i].cpu_ms) / median(ways[0].cpu_ms),
          least_of(ways[i].cpu_ms) / least_of(ways[0].cpu_ms), kept_of(ways[i].call) / kept,
          peak_of(ways[i].call) / peak);
  }

 private:
  static double least_of(const std::vector<double>& ms) { return *std::min_element(ms.begin(), ms.end()); }

  // Forward alone, below autograd: all calls boxed, and as it is done.
  void compare_executors(const Graph& forward, const Values& inputs) {
    const Executor boxed(
        forward, {.unboxed = false, .direct_views = false, .reuse_memory = false, .direct_kernels = false}),
        fast(forward);
    std::vector<at::Tensor> tensors;
    for (const c10::IValue& input : inputs) tensors.push_back(input.toTensor());
    std::vector<double> boxed_ms, fast_ms;
    for (int i = 0; i < 3 + 3 * config_.steps; ++i)
      for (const bool is_fast : {false, true}) {
        const double begin = cpu_ms();
        (is_fast ? fast : boxed)(tensors);
        if (i >= 3) (is_fast ? fast_ms : boxed_ms).push_back(cpu_ms() - begin);
      }
    fmt::print(
        "{:3} layers, forward alone, CPU time of {} operators: {:.3f} of that with boxed calls; {} unboxed, "
        "{} "
        "of them views, {} may overwrite an argument, {} products and copies\n",
        layers_, forward.nodes.size(), median(fast_ms) / median(boxed_ms), fast.counts().unboxed,
        fast.counts().views, fast.counts().reuses, fast.counts().kernels);
  }
  struct Step {
    double ms = 0, cpu_ms = 0, loss = 0;
  };
  // CPU time of the process: less disturbed than time by other processes.
  static double cpu_ms() {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
  }
  Step step(const std::function<at::Tensor()>& call) {
    for (const at::Tensor& parameter : model_->parameters()) parameter.mutable_grad() = at::Tensor();
    const auto begin = Clock::now();
    const double cpu_begin = cpu_ms();
    const at::Tensor loss = call();
    loss.backward();
    const double value = loss.item<double>();  // waits for the device
    return {ms_since(begin), cpu_ms() - cpu_begin, value};
  }

  // Peak bytes of tensors that a step allocated, excluding those that existed before.
  double peak_of(const std::function<at::Tensor()>& call) {
    const at::Device device = x_.device();
    for (const at::Tensor& parameter : model_->parameters()) parameter.mutable_grad() = at::Tensor();
    const auto live = [&] { return device.is_cpu() ? cpu_memory().live : live_device_bytes(device); };
    const std::int64_t before = live();
    if (device.is_cpu())
      reset_cpu_peak();
    else
      reset_peak_device_bytes(device);
    step(call);
    return static_cast<double>((device.is_cpu() ? cpu_memory().peak : peak_device_bytes(device)) - before);
  }

  // Bytes of tensors that forward leaves behind for backward.
  double kept_of(const std::function<at::Tensor()>& call) {
    const at::Device device = x_.device();
    const auto live = [&] { return device.is_cpu() ? cpu_memory().live : live_device_bytes(device); };
    const std::int64_t before = live();
    const at::Tensor loss = call();
    return static_cast<double>(live() - before);
  }

  const Config& config_;
  int layers_;
  Model model_;
  at::Tensor x_, target_;
};

}  // namespace

int main(int argc, char** argv) {
  Config config;
  CLI::App app("Measures capture and replay of a transformer", "graph_bench");
  app.add_option("--width", config.width, "width of the model; a multiple of 4")->check(CLI::PositiveNumber);
  app.add_option("--layers", config.layers, "one or several layer counts")->check(CLI::PositiveNumber);
  app.add_option("--batch", config.batch, "number of sequences of 64 tokens")->check(CLI::PositiveNumber);
  app.add_option("--repeats", config.repeats, "runs of each step of a capture")->check(CLI::PositiveNumber);
  app.add_option("--steps", config.steps, "training steps of each kind")->check(CLI::PositiveNumber);
  app.add_option("--device", config.device, "cpu or cuda");
  app.add_option("--peer", config.peer, "command that runs the peer: \"python3 bench/graph/graph_peer.py\"");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  pin(0);
  // As in processes that `penstock launch` starts: the heap keeps its memory, so that no step waits for pages
  // from the system.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  count_cpu_memory();
  fmt::print("LibTorch {}, {}, batch {} of {}\n", torch_version(), config.device, config.batch, kSequence);
  for (const int layers : config.layers) {
    Measured measured(config, layers);
    const double capture_us = measured.capture();
    const Figure ours = measured.steps();
    measured.budgets();
    if (!config.peer.empty()) {
      const Figure peer =
          read_figure(fmt::format("{} --width {} --layers {} --batch {} --steps {}", config.peer,
                                  config.width, layers, config.batch, config.steps),
                      "capture_us");
      fmt::print(
          "    peer: {:.0f} nodes, {:.0f} us/node, our capture is 1/{:.0f} of its time; its replayed step is "
          "{:.3f} of its eager one, ours {:.3f} of "
          "its replayed one; loss and norm {}\n",
          peer.at("nodes"), peer.at("capture_us") / peer.at("nodes"), peer.at("capture_us") / capture_us,
          peer.at("step_ms") / peer.at("eager_ms"), ours.at("step_ms") / peer.at("step_ms"),
          same_training(ours, peer));
    }
    std::fflush(stdout);
  }
  return 0;
}
