// The overhead of the runtime: all stages on one rank, with so little work that host time dominates.
//
//   pipeline_host_bench [--device cuda] [--device-graph]
//       1, 2 and 4 stages of a 64-wide layer, 16 microbatches; microseconds per (stage, microbatch)
//
// With --device-graph the steps are recorded and replayed by the device (PipelineOptions::device_graph). The
// same work in a plain loop of microbatches in one process is subtracted; the remainder is the overhead of
// the pipeline.
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "penstock/pipeline.h"
#include "penstock/torch/compat/version.h"

namespace {

using namespace penstock;

constexpr int kMicrobatches = 16, kWidth = 64, kWarmup = 5, kSteps = 31;

double median_us(const std::function<void()>& step, const at::Device& device) {
  const auto synchronize = [&] {
    if (device.is_cuda()) torch::cuda::synchronize();
  };
  for (int i = 0; i < kWarmup; ++i) step();
  std::vector<double> times;
  for (int i = 0; i < kSteps; ++i) {
    synchronize();
    const auto begin = std::chrono::steady_clock::now();
    step();
    synchronize();
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + kSteps / 2, times.end());
  return times[kSteps / 2];
}

}  // namespace

int main(int argc, char** argv) {
  at::Device device = at::kCPU;
  bool device_graph = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
      device = at::Device(argv[++i]);
    } else if (std::strcmp(argv[i], "--device-graph") == 0) {
      device_graph = true;
    } else {
      fmt::print("usage: pipeline_host_bench [--device cpu|cuda] [--device-graph]\n");
      return std::strcmp(argv[i], "--help") == 0 ? 0 : 2;
    }
  }
  at::set_num_threads(1);
  comm::World world = comm::World::from_env();
  fmt::print("LibTorch {}, {}; microseconds per (stage, microbatch)\n{:>6} {:>10} {:>10} {:>10}\n",
             torch_version(), device.str(), "stages", "pipeline", "plain loop", "runtime");
  for (const int stages : {1, 2, 4}) {
    std::vector<torch::nn::Sequential> layers;
    std::vector<PipelineStage> all;
    for (int i = 0; i < stages; ++i) {
      torch::nn::Sequential layer(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh());
      layer->to(device);
      layers.push_back(layer);
      all.emplace_back(layer, i, stages, device);
    }
    const at::Tensor x = torch::randn({kMicrobatches, kWidth}, device),
                     target = torch::randn({kMicrobatches, kWidth}, device);
    PipelineRuntime pipeline = make_pipeline(
        stages == 1 ? "1F1B" : "Interleaved1F1B", all, kMicrobatches,
        [](const at::Tensor& output, const at::Tensor& wanted) { return torch::mse_loss(output, wanted); },
        {.world = world, .device_graph = device_graph});
    const auto zero = [&] {
      for (auto& layer : layers) layer->zero_grad();
    };
    const double ours = median_us([&] { zero(), pipeline.step(Tree::tuple({x}), {}, target); }, device);
    const double plain = median_us(
        [&] {
          zero();
          const auto xs = x.chunk(kMicrobatches), targets = target.chunk(kMicrobatches);
          for (int m = 0; m < kMicrobatches; ++m) {
            at::Tensor y = xs[static_cast<std::size_t>(m)];
            for (auto& layer : layers) y = layer->forward(y);
            torch::mse_loss(y, targets[static_cast<std::size_t>(m)]).backward();
          }
        },
        device);
    const double each = stages * kMicrobatches;
    fmt::print("{:>6} {:>10.1f} {:>10.1f} {:>10.1f}\n", stages, ours / each, plain / each,
               (ours - plain) / each);
  }
  return 0;
}
