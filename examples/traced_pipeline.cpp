// One model, cut into a stage per rank without changing it:
//   ./run launch -n 4 -- build/release/bin/traced_pipeline
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "examples/failure.h"
#include "penstock/trace_pipeline.h"

namespace {

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int width) {
    body = register_module("body", torch::nn::Linear(width, width));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  at::Tensor forward(const at::Tensor& x) {
    const penstock::ModuleScope scope(*this);  // lets traces know which operators belong to this module
    return x + torch::gelu(body->forward(norm->forward(x)));
  }
  torch::nn::Linear body{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Layer);

// Like a U-Net: the second half uses what the first half has made.
struct SkipModelImpl : torch::nn::Module {
  SkipModelImpl(int layers, int width) {
    for (int i = 0; i < layers; ++i)
      list.push_back(register_module("layer" + std::to_string(i), Layer(width)));
  }
  at::Tensor forward(at::Tensor x) {
    std::vector<at::Tensor> down;
    const std::size_t half = list.size() / 2;
    for (std::size_t i = 0; i < half; ++i) down.push_back(x = list[i]->forward(x));
    for (std::size_t i = half; i < list.size(); ++i) {
      x = list[i]->forward(x + down.back());
      down.pop_back();
    }
    return x;
  }
  std::vector<Layer> list;
};
TORCH_MODULE(SkipModel);

}  // namespace

int main() try {
  using namespace penstock;
  auto world = comm::World::from_env();  // penstock launch, torchrun --no-python, mpirun or srun
  constexpr int kMicrobatches = 8, kRows = 4, kWidth = 64;

  // Every rank makes the whole model without memory, and gets that of its own stage alone.
  DeferredInit deferred;
  SkipModel model{nullptr};
  {
    const ModeGuard without_memory(deferred);
    model = SkipModel(8, kWidth);
  }
  const at::Tensor example = torch::zeros({kRows, kWidth});  // one microbatch
  const Pipe pipe = trace_pipeline(model, Tree::tuple({example}), {}, PipeSplit::into(world.size()));
  if (world.rank() == 0) std::cout << pipe.to_text();

  torch::manual_seed(1);
  BuildStageOptions build;
  build.deferred = &deferred;
  build.group = world.group();  // all ranks have traced and cut the same model
  const PipelineStage stage = build_stage(pipe, world.rank(), torch::kCPU, build);

  PipelineOptions options{world};
  options.skips = pipe.skips();
  options.info = pipe.info();
  Schedule1F1B schedule(
      stage, kMicrobatches,
      [](const at::Tensor& y, const at::Tensor& target) { return torch::mse_loss(y, target); }, options);
  torch::optim::AdamW optimizer(stage.parameters(), torch::optim::AdamWOptions(1e-2));

  torch::manual_seed(7);  // the batch is the same everywhere
  for (int step = 0; step < 20; ++step) {
    const at::Tensor x = torch::randn({kMicrobatches * kRows, kWidth});
    optimizer.zero_grad();
    const StepResult result = schedule.step(Tree::tuple({x}), {}, x.sin());
    optimizer.step();
    if (!result.losses.empty())
      std::printf("step %2d  loss %.4f\n", step, torch::stack(result.losses).mean().item<double>());
  }
} catch (...) {
  return failure("traced_pipeline");
}
