// Distributed tensors on a GPU: training on one rank, redistribution also between two that share it through
// host memory. Ranks that are threads cannot run backward together: autograd has one thread per GPU in a
// process, and a rank that waits in it for another blocks that other rank. For ranks that are processes, see
// process_test.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "penstock/comm/backend/backend.h"
#include "penstock/dtensor.h"
#include "penstock/tensor_parallel.h"
#include "tests/dtensor/small_transformer.h"

namespace penstock {
namespace dtensor_gpu_test {

using namespace std::chrono_literals;
using namespace test;

void check_training(int ranks, const Plan& plan) {
  const at::Device device(at::kCUDA, 0);
  const Training expected =
      train(make_model(device), [&](const at::Tensor& tokens) { return tokens.to(device); });
  std::vector<Model> models;
  for (int rank = 0; rank < ranks; ++rank) models.push_back(make_model(device));
  std::mutex mutex;
  comm::run_ranks(ranks, 120s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {ranks}, {"tp"}, world.rank(), ranks));
    Model model = models[static_cast<std::size_t>(world.rank())];
    parallelize_module(*model, mesh, plan);
    distribute_module(*model, mesh);
    const Training actual = train(model, [&](const at::Tensor& tokens) {
      return distribute_tensor(tokens.to(device), mesh, {Replicate{}});
    });
    const std::lock_guard lock(mutex);
    for (std::size_t step = 0; step < expected.losses.size(); ++step)
      EXPECT_NEAR(actual.losses[step], expected.losses[step], 1e-9) << step;
    for (const auto& [name, value] : expected.parameters) {
      EXPECT_TRUE(actual.parameters.at(name).is_cuda()) << name;
      EXPECT_TRUE(at::allclose(actual.parameters.at(name), value, 1e-9, 1e-9)) << name;
    }
  });
}

TEST(DTensorGpu, OneRank) { check_training(1, tensor_plan()); }
TEST(DTensorGpu, OneRankWithSequence) { check_training(1, sequence_plan()); }
TEST(DTensorGpu, EveryRedistribution) {
  const at::Device device(at::kCUDA, 0);
  const int ranks = comm::gloo_available() ? 2 : 1;
  comm::run_ranks(ranks, 120s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {ranks}, {"tp"}, world.rank(), ranks));
    const at::Tensor whole = at::arange(15, at::TensorOptions(device).dtype(at::kFloat)).view({5, 3});
    const std::vector<Placement> all{Replicate{}, Shard{0}, Shard{1}, StridedShard{0, 2}};
    for (const Placement& from : all)
      for (const Placement& to : all) {
        const at::Tensor moved = redistribute(distribute_tensor(whole, mesh, {from}), {to}, {.async = true});
        EXPECT_TRUE(to_local(moved).is_cuda());
        EXPECT_TRUE(at::equal(full_tensor(moved), whole)) << from.to_string() << " to " << to.to_string();
      }
  });
}

}  // namespace dtensor_gpu_test
}  // namespace penstock
