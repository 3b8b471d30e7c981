// What capture and replay cost: a transformer of 1, 4, 12 and 48 layers, microseconds per node for each stage of the way from a function to
// a graph, and the replayed training step against the same step run eagerly. "In shape" is forward and backward over fake tensors with
// nobody recording; what a capture costs more than that is the recording.
//
//   graph_bench [width] [layers ...]        PENSTOCK_BENCH_REPEAT=20: more runs of each stage, of which the best counts
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "penstock/graph/compiled.h"
#include "penstock/graph/execute.h"
#include "penstock/graph/functionalize.h"
#include "penstock/torch/fake.h"

namespace {

using namespace penstock::graph;
using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kHeads = 4, kBatch = 2, kLength = 16;
constexpr std::size_t kPerLayer = 8;

// The least of several runs, in microseconds; `prepare` goes before each and is not counted.
double measure(int runs, const std::function<void()>& work, const std::function<void()>& prepare = [] {}) {
  double best = 1e30;
  for (int i = 0; i < runs; ++i) {
    prepare();
    const auto begin = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

at::Tensor layer(const at::Tensor& x, const Values& in, std::size_t first) {
  const auto weight = [&](std::size_t i) -> const at::Tensor& { return in[first + i].toTensor(); };
  const std::int64_t width = x.size(-1);
  const at::Tensor normed = torch::layer_norm(x, {width}, weight(0), weight(1));
  const auto parts = torch::linear(normed, weight(2)).view({kBatch, kLength, 3, kHeads, width / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
  const at::Tensor scores = parts[0].matmul(parts[1].transpose(-1, -2)).div(std::sqrt(static_cast<double>(width) / kHeads));
  const at::Tensor mixed = scores.softmax(-1).matmul(parts[2]).transpose(1, 2).reshape({kBatch, kLength, width});
  const at::Tensor h = x + torch::linear(mixed, weight(3));
  const at::Tensor hidden = torch::gelu(torch::linear(torch::layer_norm(h, {width}, weight(4), weight(5)), weight(6)));
  return h + torch::linear(hidden, weight(7));
}

void run(std::int64_t width, std::size_t layers) {
  const char* asked = std::getenv("PENSTOCK_BENCH_REPEAT");
  const int repeats = asked ? std::max(1, std::atoi(asked)) : 7;
  torch::manual_seed(1);
  Values inputs{torch::randn({kBatch, kLength, width})};
  const auto parameter = [&](at::IntArrayRef sizes) { inputs.emplace_back((torch::randn(sizes) * 0.05).set_requires_grad(true)); };
  for (std::size_t i = 0; i < layers; ++i) {
    parameter({width}), parameter({width}), parameter({3 * width, width}), parameter({width, width});
    parameter({width}), parameter({width}), parameter({4 * width, width}), parameter({width, 4 * width});
  }
  const Function function = [&](const Values& in) -> Values {
    at::Tensor x = in[0].toTensor();
    for (std::size_t i = 0; i < layers; ++i) x = layer(x, in, 1 + i * kPerLayer);
    return {x.pow(2).mean()};
  };

  JointGraph joint;
  const double in_shape = measure(repeats, [&] {
    penstock::FakeMode mode;
    Values fakes;
    for (const c10::IValue& input : inputs) fakes.emplace_back(penstock::to_fake(input.toTensor()));
    const penstock::ModeGuard guard(mode);
    function(fakes)[0].toTensor().backward();
  });
  // Each run gives its graph away outside of the measurement.
  const double capture = measure(repeats, [&] { joint = *analyze_and_capture(function, inputs).joint; }, [&] { joint = {}; });
  const auto nodes = static_cast<double>(joint.graph.nodes.size());
  const JointGraph captured = joint;
  const double functional = measure(repeats, [&] {
    joint.graph = functionalize(std::move(joint.graph));
    remove_dead_nodes(joint.graph);
  }, [&] { joint = captured; });
  Partition halves;
  const double split = measure(repeats, [&] { halves = partition_default(joint); }, [&] { halves = {}; });
  fmt::print("{:3} layers, {:5} nodes: in shape {:5.2f}, recording {:5.2f}; analysis and capture {:5.2f}, functionalize {:5.2f}, partition {:5.2f}, "
             "together {:5.2f} us/node\n",
             layers, joint.graph.nodes.size(), in_shape / nodes, (capture - in_shape) / nodes, capture / nodes, functional / nodes, split / nodes,
             (capture + functional + split) / nodes);

  const auto step = [&](const std::function<Values(const Values&)>& call) {
    for (std::size_t i = 1; i < inputs.size(); ++i) inputs[i].toTensor().mutable_grad() = at::Tensor();
    call(inputs)[0].toTensor().backward();
  };
  Compiled compiled(function);
  step([&](const Values& in) { return compiled(in); });
  // In turns, so that both see the same machine.
  double eager_us = 1e30, replay_us = 1e30;
  for (int i = 0; i < 10; ++i) {
    eager_us = std::min(eager_us, measure(1, [&] { step(function); }));
    replay_us = std::min(replay_us, measure(1, [&] { step([&](const Values& in) { return compiled(in); }); }));
  }
  fmt::print("    step, width {}: eager {:.0f} us, replayed {:.0f} us, ratio {:.3f}\n", width, eager_us, replay_us, replay_us / eager_us);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::int64_t width = argc > 1 ? std::atoll(argv[1]) : 32;
  if (width <= 0 || width % kHeads != 0) {
    fmt::print(stderr, "graph_bench: width {}, expected a multiple of {}\n", width, kHeads);
    return 1;
  }
  std::vector<std::size_t> layers;
  for (int i = 2; i < argc; ++i) layers.push_back(static_cast<std::size_t>(std::atoll(argv[i])));
  if (layers.empty()) layers = {1, 4, 12, 48};
  for (const std::size_t count : layers) run(width, count);
  return 0;
}
