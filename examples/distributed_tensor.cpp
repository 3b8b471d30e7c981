// A tensor-parallel block on distributed tensors: shows how each operator's result is placed and what it
// costs to redistribute it, and checks that the values equal those of one process.
//   penstock launch -n 4 -- distributed_tensor         (or without launch, as one rank)
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <string_view>
#include <utility>

#include "examples/failure.h"
#include "penstock/dtensor.h"

using namespace penstock;

int main() try {
  auto world = comm::World::from_env();
  const int dp = world.size() % 2 == 0 ? 2 : 1;
  const comm::MeshGroups mesh = world.mesh("cpu", {{"dp", dp}, {"tp", world.size() / dp}});
  const auto show = [&](std::string_view name, const torch::Tensor& tensor) {
    if (world.rank() == 0)
      fmt::print("{:<10} [{}] as {}\n", name, fmt::join(tensor.sizes(), ", "),
                 to_string(placements_of(tensor)));
  };

  // Every rank has the whole values (same seed). A source_axis_rank of nullopt declares that, and nothing is
  // sent.
  torch::manual_seed(1);
  const DistributeOptions equal{.source_axis_rank = {}};
  const torch::Tensor input = torch::randn({5, 8}), up = torch::randn({16, 8}), down = torch::randn({8, 16});
  const torch::Tensor x = distribute_tensor(input, mesh, {Shard{0}, Replicate{}}, equal);  // batch over dp
  const torch::Tensor w1 =
      distribute_tensor(up, mesh, {Replicate{}, Shard{0}}, equal).requires_grad_();  // rows over tp
  const torch::Tensor w2 =
      distribute_tensor(down, mesh, {Replicate{}, Shard{1}}, equal).requires_grad_();  // columns over tp

  const torch::Tensor hidden = torch::relu(torch::linear(x, w1));  // no communication:
  const torch::Tensor terms = torch::linear(hidden, w2);           // each tp rank has a term of the sum
  const torch::Tensor y = redistribute(terms, {Shard{0}, Replicate{}});
  const torch::Tensor loss = (y * y).sum();
  loss.backward();
  for (const auto& [name, tensor] : {std::pair{"x", x},
                                     {"w1", w1},
                                     {"hidden", hidden},
                                     {"terms", terms},
                                     {"y", y},
                                     {"loss", loss},
                                     {"w1.grad", w1.grad()}})
    show(name, tensor);

  if (world.rank() == 0) {
    fmt::print("\nterms -> y, planned:\n{}\n", describe_redistribution(terms, placements_of(y)));
    fmt::print("{}", draw_sharding_text(hidden));
  }

  // The same in one process with plain tensors.
  const torch::Tensor w = up.clone().requires_grad_();
  torch::linear(torch::relu(torch::linear(input, w)), down).square().sum().backward();
  const bool same = torch::allclose(full_tensor(w1.grad()), w.grad(), 1e-4, 1e-4);
  if (world.rank() == 0) fmt::print("\nthe gradient is {} of one process\n", same ? "that" : "NOT that");
  return same ? 0 : 1;
} catch (...) {
  return failure("distributed_tensor");
}
