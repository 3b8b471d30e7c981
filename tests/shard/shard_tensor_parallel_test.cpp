// Parameters that are distributed before they are sharded: tensor parallel inside data parallel.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/tensor_parallel.h"
#include "tests/has_text.h"
#include "tests/shard/sharded_training.h"
#include "tests/throws.h"

namespace penstock {
namespace shard_tensor_parallel_test {

using namespace std::chrono_literals;
using namespace penstock::test;

comm::MeshGroups grid(comm::World& world, std::vector<std::int64_t> shape, std::vector<std::string> names) {
  return {world, init_device_mesh("cpu", shape, names, world.rank(), world.size())};
}

// The tensor-parallel axis is a separate mesh; each data-parallel rank has its rows.
void check_two_meshes(const std::vector<std::int64_t>& shape, const Plan& plan,
                      const ShardOptions& options = {}) {
  alone();
  comm::run_ranks(static_cast<int>(shape[0] * shape[1]), 120s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, shape, {"dp", "tp"});
    const comm::MeshGroups tp = mesh.with_mesh(mesh.mesh()["tp"]), dp = mesh.with_mesh(mesh.mesh()["dp"]);
    Model model = same_model();
    parallelize_module(*model, tp, plan);
    distribute_module(*model, tp);
    shard_by_blocks(model, dp, options);
    const auto place = [&](const at::Tensor& tensor) { return distribute_tensor(tensor, tp, {Replicate{}}); };
    const Training ours = train_share(model, {.rank = static_cast<int>(mesh.coordinate()[0]),
                                              .ranks = static_cast<int>(shape[0]),
                                              .place = place});
    expect_same_parameters(ours, alone());
  });
}

TEST(ShardedTensorParallel, TwoByTwo) { check_two_meshes({2, 2}, tensor_plan()); }
TEST(ShardedTensorParallel, WithSequences) { check_two_meshes({2, 2}, sequence_plan()); }
TEST(ShardedTensorParallel, UnevenlyOverThree) { check_two_meshes({3, 2}, tensor_plan()); }
TEST(ShardedTensorParallel, AlongTheLastDim) {
  check_two_meshes({2, 2}, tensor_plan(), {.shard_placement = [](const std::string&, const at::Tensor& p) {
                     return Shard{p.dim() - 1};
                   }});
}
TEST(ShardedTensorParallel, KeepingASliceAfterForward) {
  check_two_meshes({4, 2}, tensor_plan(), {.reshard_after_forward = ReshardTo{2}});
}

// All on one mesh: the batch is distributed as well, and losses are those of the whole batch.
TEST(ShardedSpmd, DataParallelAxesByName) {
  alone();
  comm::run_ranks(4, 120s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
    Model model = same_model();
    parallelize_module(*model, mesh, tensor_plan(), {.axis = "tp"});
    distribute_module(*model, mesh);
    shard_by_blocks(model, mesh, {.shard_axes = {"dp"}});
    const at::Tensor weight = model->blocks[0]->as<BlockImpl>()->up->weight;
    EXPECT_EQ(placements_of(weight), (Placements{StridedShard{0, 2}, Shard{0}}));
    const auto place = [&](const at::Tensor& tensor) {
      return distribute_tensor(tensor, mesh, {Shard{0}, Replicate{}});
    };
    const Training ours = train_share(model, {.place = place});
    expect_same_parameters(ours, alone());
    for (std::size_t i = 0; i < ours.losses.size(); ++i) EXPECT_NEAR(ours.losses[i], alone().losses[i], 1e-9);
  });
}

TEST(ShardedSpmd, AxesMustBeFree) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
    torch::nn::Linear linear(4, 4);
    distribute_parameter(linear->weight, mesh, {Shard{0}, Replicate{}});
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { fully_shard(*linear, mesh, {.shard_axes = {"dp"}}); }),
                         "shard axis 'dp' (0)"));
  });
}

}  // namespace shard_tensor_parallel_test
}  // namespace penstock
