// The ranks connect and compute a sum.
//   penstock launch -n 4 -- hello_world
#include <fmt/format.h>
#include <torch/torch.h>

#include "examples/failure.h"
#include "penstock/world.h"

int main() try {
  auto world = penstock::comm::World::from_env();
  const auto& everyone = world.group();

  torch::Tensor sum = torch::full({3}, world.rank() + 1.0);
  everyone.all_reduce(sum).wait();

  // Pass a token around the ring.
  const int next = (world.rank() + 1) % world.size(),
            previous = (world.rank() + world.size() - 1) % world.size();
  torch::Tensor token = torch::full({1}, world.rank()), received = torch::zeros({1}, torch::kLong);
  if (world.size() > 1) {
    using penstock::comm::P2POp;
    auto works = everyone.batch_isend_irecv({P2POp::send(token, next), P2POp::recv(received, previous)});
    penstock::comm::wait_all(works);
  }
  fmt::print("rank {} of {}: the sum is {}, the token came from rank {}\n", world.rank(), world.size(),
             sum[0].item<float>(), received.item<std::int64_t>());
} catch (...) {
  return failure("hello_world");
}
