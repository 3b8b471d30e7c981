// Parameters of one module that are shared by different ranks: ShardOptions::shard_placement chooses a mesh
// for each.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/shard/state/shard_state.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace shard_choice_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;
namespace nn = torch::nn;

at::Tensor drawn(at::IntArrayRef shape, std::uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble));
}

// Every rank has the same dense part; `seed` chooses the expert.
struct ExpertModel : nn::Module {
  explicit ExpertModel(std::uint64_t seed) {
    dense = register_parameter("dense", drawn({6, 5}, 1));
    expert = register_parameter("expert", drawn({7, 6}, seed));
    scale = register_parameter("scale", drawn({7}, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return (at::tanh(x.matmul(dense.t())).matmul(expert.t()) * scale).pow(2).sum();
  }
  at::Tensor dense, expert, scale;
};

at::Tensor batch(int rank, int step) {
  return drawn({3, 5}, static_cast<std::uint64_t>(100 + 10 * step + rank));
}

using Values = std::map<std::string, at::Tensor>;

// Plain SGD steps of all ranks in one process. `experts[rank]`: the expert of a rank; ranks with the same
// expert average its gradient.
std::vector<Values> plain_steps(const std::vector<int>& experts, int steps) {
  std::vector<std::shared_ptr<ExpertModel>> models;
  for (const int expert : experts)
    models.push_back(std::make_shared<ExpertModel>(static_cast<std::uint64_t>(10 + expert)));
  const auto average = [&](const std::string& name, const std::vector<std::size_t>& ranks) {
    const at::NoGradGuard no_grad;
    at::Tensor sum = at::zeros_like(models[0]->named_parameters()[name]);
    for (const std::size_t rank : ranks)
      sum += models[rank]->named_parameters()[name].grad() / static_cast<double>(ranks.size());
    for (const std::size_t rank : ranks) models[rank]->named_parameters()[name].sub_(sum, 0.01);
  };
  for (int step = 0; step < steps; ++step) {
    for (std::size_t rank = 0; rank < models.size(); ++rank) {
      models[rank]->zero_grad();
      models[rank]->forward(batch(static_cast<int>(rank), step)).backward();
    }
    std::vector<std::size_t> all;
    std::map<int, std::vector<std::size_t>> by_expert;
    for (std::size_t rank = 0; rank < models.size(); ++rank) {
      all.push_back(rank);
      by_expert[experts[rank]].push_back(rank);
    }
    average("dense", all);
    average("scale", all);
    for (const auto& [expert, ranks] : by_expert) average("expert", ranks);
  }
  std::vector<Values> values;
  for (const auto& model : models) {
    values.emplace_back();
    for (const auto& item : model->named_parameters())
      values.back()[item.key()] = item.value().detach().clone();
  }
  return values;
}

void train_sharded(ExpertModel& model, int rank, int steps) {
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const ForwardScope scope(model);
    model.forward(batch(rank, step)).backward();
    optimizer.step();
  }
}

// Experts of pairs of ranks next to parameters that all four ranks share.
TEST(ShardChoice, ExpertsAreSharedByFewerRanks) {
  const std::vector<Values> expected = plain_steps({0, 0, 1, 1}, 3);
  for (const std::int64_t dim : {0, 1})
    comm::run_ranks(4, 60s, [&](comm::World& world) {
      const comm::MeshGroups all(world, init_device_mesh("cpu", {4}, {"dp"}, world.rank(), 4));
      const comm::MeshGroups grid(world,
                                  init_device_mesh("cpu", {2, 2}, {"experts", "shards"}, world.rank(), 4));
      const comm::MeshGroups pair = grid.with_mesh(grid.mesh()["shards"]);
      ExpertModel model(static_cast<std::uint64_t>(10 + world.rank() / 2));
      const auto state = fully_shard(
          model, all, {.shard_placement = [&](const std::string& name, const at::Tensor&) -> ShardChoice {
            if (name == "expert") return {Shard{dim}, pair};
            return std::nullopt;
          }});
      ASSERT_EQ(own_groups(*state).size(), 2u);
      EXPECT_EQ(own_groups(*state)[0]->mesh().shard_ranks(), 4);
      EXPECT_EQ(own_groups(*state)[1]->mesh().shard_ranks(), 2);
      EXPECT_EQ(mesh_of(model.expert).mesh().ranks(), pair.mesh().ranks());
      EXPECT_EQ(placements_of(model.expert), (Placements{Shard{dim}}));
      state->unshard();
      EXPECT_TRUE(
          at::equal(model.expert.detach(), drawn({7, 6}, static_cast<std::uint64_t>(10 + world.rank() / 2))));
      EXPECT_FALSE(is_dtensor(model.dense));
      state->reshard();
      EXPECT_TRUE(is_dtensor(model.expert));
      train_sharded(model, world.rank(), 3);
      for (const auto& [name, value] : expected[static_cast<std::size_t>(world.rank())])
        EXPECT_TRUE(at::allclose(full_tensor(model.named_parameters()[name].detach()), value, 1e-9, 1e-12))
            << name << ", dim " << dim;
    });
}

// One parameter is replicated over an axis that shards the others.
TEST(ShardChoice, AMeshWithReplicas) {
  const std::vector<Values> expected = plain_steps({0, 0, 0, 0}, 2);
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups all(world, init_device_mesh("cpu", {4}, {"dp"}, world.rank(), 4));
    const comm::MeshGroups grid(world,
                                init_device_mesh("cpu", {2, 2}, {"replicas", "shards"}, world.rank(), 4));
    ExpertModel model(10);
    const auto state =
        fully_shard(model, all, {.shard_placement = [&](const std::string& name, const at::Tensor&) {
                      return name == "dense" ? ShardChoice(Shard{1}, grid) : ShardChoice(Shard{0}, all);
                    }});
    ASSERT_EQ(own_groups(*state).size(), 2u) << "the mesh of fully_shard, given again, is no other";
    EXPECT_EQ(placements_of(model.dense), (Placements{Replicate{}, Shard{1}}));
    train_sharded(model, world.rank(), 2);
    for (const auto& [name, value] : expected[0])
      EXPECT_TRUE(at::allclose(full_tensor(model.named_parameters()[name].detach()), value, 1e-9, 1e-12))
          << name;
  });
}

// The groups of a module are used side by side: using one does not free the other; the end of the scope frees
// both.
TEST(ShardChoice, GroupsOfOneModuleAreGatheredAndFreedTogether) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups all(world, init_device_mesh("cpu", {2}, {"dp"}, world.rank(), 2));
    const comm::MeshGroups grid(world,
                                init_device_mesh("cpu", {2, 1}, {"replicas", "shards"}, world.rank(), 2));
    ExpertModel model(10);
    const auto state = fully_shard(
        model, all,
        {.reshard_after_forward = true, .shard_placement = [&](const std::string& name, const at::Tensor&) {
           return name == "dense" ? ShardChoice(Shard{0}, grid) : ShardChoice();
         }});
    const auto states = [&] {
      std::vector<std::string> texts;
      for (const ShardGroup* group : own_groups(*state)) texts.emplace_back(to_text(group->state()));
      return texts;
    };
    model.forward(batch(0, 0));
    EXPECT_EQ(states(), (std::vector<std::string>{"Unsharded", "Unsharded"}));
    {
      const ForwardScope scope(model);
      model.forward(batch(0, 0));
      EXPECT_EQ(states(), (std::vector<std::string>{"Unsharded", "Unsharded"}));
    }
    EXPECT_EQ(states(), (std::vector<std::string>{"Sharded", "Sharded"}));
    state->unshard();
    EXPECT_EQ(states(), (std::vector<std::string>{"Unsharded", "Unsharded"}));
    state->reshard();
    EXPECT_EQ(states(), (std::vector<std::string>{"Sharded", "Sharded"}));
  });
}

TEST(ShardChoice, MeshesThatDoNotFitAreRefused) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups all(world, init_device_mesh("cpu", {2}, {"dp"}, world.rank(), 2));
    const comm::MeshGroups cube(world, init_device_mesh("cpu", {1, 1, 2}, {"a", "b", "c"}, world.rank(), 2));
    const comm::MeshGroups gpus(world, init_device_mesh("cuda", {2}, {"dp"}, world.rank(), 2));
    ExpertModel model(10);
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           fully_shard(model, all,
                                       {.shard_placement = [&](const std::string&, const at::Tensor&) {
                                         return ShardChoice(Shard{0}, cube);
                                       }});
                         }),
                         "one axis (shard) or two"));
    EXPECT_TRUE(
        has_text(message_of<ValueError>([&] { fully_shard(model, gpus); }), "move the module to its device"));
    fully_shard(model, all);
  });
}

}  // namespace shard_choice_test
}  // namespace penstock
