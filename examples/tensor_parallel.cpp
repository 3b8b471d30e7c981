// Trains an ordinary module with its layers split over all ranks: penstock launch -n 2 -- tensor_parallel
#include <torch/torch.h>

#include <cstdio>

#include "examples/failure.h"
#include "penstock/dtensor.h"
#include "penstock/tensor_parallel.h"

int main() try {
  using namespace penstock;
  auto world = comm::World::from_env();  // penstock launch, torchrun --no-python, mpirun or srun
  comm::MeshGroups mesh = world.mesh("cpu", {{"tp", world.size()}});

  torch::manual_seed(1);  // every rank draws the same numbers
  torch::nn::Sequential mlp(torch::nn::Linear(64, 256), torch::nn::GELU(), torch::nn::Linear(256, 64));
  parallelize_module(*mlp, mesh, {{"0", colwise_parallel()}, {"2", rowwise_parallel()}});
  torch::optim::AdamW optimizer(mlp->parameters(), torch::optim::AdamWOptions(1e-2));

  for (int step = 0; step < 20; ++step) {
    auto x = torch::randn({32, 64});
    auto loss = torch::mse_loss(mlp->forward(x), x.sin());  // plain tensors in, plain tensors out
    optimizer.zero_grad();
    loss.backward();   // one all-reduce forward, one backward
    optimizer.step();  // on this rank's part of the parameters
    if (world.rank() == 0) std::printf("step %2d  loss %.4f\n", step, loss.item<double>());
  }
} catch (...) {
  return failure("tensor_parallel");
}
