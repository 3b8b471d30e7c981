// A model cut into one stage per rank, trained by 1F1B: ./run launch -n 2 -- build/release/bin/pipeline
#include <torch/torch.h>

#include <cstdio>

#include "examples/failure.h"
#include "penstock/pipeline.h"

int main() try {
  using namespace penstock;
  auto world = comm::World::from_env();  // penstock launch, torchrun --no-python, mpirun or srun

  // Every rank creates its own part; a trial run with shapes only determines the shapes between the parts.
  torch::manual_seed(1 + world.rank());
  torch::nn::Sequential part(torch::nn::Linear(64, 64), torch::nn::GELU(), torch::nn::Linear(64, 64));
  PipelineStage stage(part, world.rank(), world.size(), torch::kCPU);
  Schedule1F1B schedule(
      stage, /*n_microbatches=*/8,
      [](const at::Tensor& y, const at::Tensor& target) { return torch::mse_loss(y, target); }, {world});
  torch::optim::AdamW optimizer(part->parameters(), torch::optim::AdamWOptions(1e-2));

  torch::manual_seed(
      7);  // the batch is the same everywhere; the first stage takes x, the last one the target
  for (int step = 0; step < 20; ++step) {
    auto x = torch::randn({32, 64});
    optimizer.zero_grad();
    auto result = schedule.step(Tree::tuple({x}), {}, x.sin());
    optimizer.step();
    if (!result.losses.empty())
      std::printf("step %2d  loss %.4f\n", step, torch::stack(result.losses).mean().item<double>());
  }
} catch (...) {
  return failure("pipeline");
}
