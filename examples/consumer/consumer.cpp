#include <torch/torch.h>

#include <exception>
#include <iostream>

#include "penstock/world.h"

int main() try {
  auto world = penstock::comm::World::from_env();
  torch::Tensor one = torch::ones({1});
  world.group().all_reduce(one).wait();
  std::cout << "rank " << world.rank() << " counted " << one.item<float>() << " ranks\n";
  return one.item<float>() == static_cast<float>(world.size()) ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "consumer: " << error.what() << "\n";
  return 1;
}
