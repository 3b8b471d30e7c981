// Combinations of options: training on shards equals training in one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/gradients.h"
#include "penstock/optimizer.h"
#include "penstock/tensor_parallel.h"
#include "tests/has_text.h"
#include "tests/shard/sharded_training.h"
#include "tests/throws.h"

namespace penstock {
namespace sharded_parity_test {

using namespace std::chrono_literals;
using namespace penstock::test;

comm::MeshGroups grid(comm::World& world, std::vector<std::int64_t> shape, std::vector<std::string> names) {
  return {world, init_device_mesh("cpu", shape, names, world.rank(), world.size())};
}

std::vector<optim::NamedParameter> named(const Model& model) {
  std::vector<optim::NamedParameter> result;
  for (const auto& item : model->named_parameters()) result.push_back({item.key(), item.value()});
  return result;
}

// ---- clipping, accumulation, offload and mixed precision at once ----

constexpr double kLimit = 0.3;  // small enough that every step is clipped
constexpr int kSteps = 3;

struct Clipped {
  std::vector<double> norms;
  std::map<std::string, at::Tensor> parameters;
};

optim::SGD sgd(const Model& model) {
  return optim::SGD(optim::decay_groups(named(model)),
                    optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
}

at::Tensor loss_of(Model& model, const at::Tensor& tokens) {
  return nn::functional::cross_entropy(model->forward(tokens).reshape({-1, kVocabulary}),
                                       tokens.roll(1, 1).reshape({-1}));
}

// Parameters in float64, computed with in float32, in one process without the library.
const Clipped& mixed_alone() {
  static const Clipped result = [] {
    Model master = make_model();
    optim::SGD optimizer = sgd(master);
    Clipped run;
    for (int step = 0; step < kSteps; ++step) {
      Model cast = make_model();
      {
        const at::NoGradGuard no_grad;
        const auto values = master->named_parameters();
        for (auto& item : cast->named_parameters()) item.value().copy_(values[item.key()]);
      }
      cast->to(at::kFloat);
      loss_of(cast, shared_tokens(step)).backward();
      const auto gradients = cast->named_parameters();
      for (const auto& item : named(master))
        item.tensor.mutable_grad() = gradients[item.name].grad().to(at::kDouble);
      run.norms.push_back(optim::clip_grad_norm(optimizer.parameters(), kLimit).value());
      optimizer.step();
    }
    for (const auto& item : named(master)) run.parameters[item.name] = item.tensor.detach().clone();
    return run;
  }();
  return result;
}

struct Combination {
  std::string name;
  std::vector<std::int64_t> shape;  // of the mesh
  int microbatches;
  bool keep_gathered;  // over the microbatches of a step
  std::optional<ReshardAfterForward> reshard = {};
  bool by_replicate = false;
};

void check_together(const Combination& how) {
  const Clipped& expected = mixed_alone();
  EXPECT_GT(expected.norms[0], kLimit);
  int ranks = 1;
  for (const std::int64_t size : how.shape) ranks *= static_cast<int>(size);
  comm::run_ranks(ranks, 120s, [&](comm::World& world) {
    SCOPED_TRACE(how.name);
    const comm::MeshGroups mesh =
        grid(world, how.shape,
             how.shape.size() == 1 ? std::vector<std::string>{"shards"}
                                   : std::vector<std::string>{"replicas", "shards"});
    Model model = same_model();
    ShardOptions options{.reshard_after_forward = how.reshard,
                         .mixed_precision = {.param_dtype = at::kFloat, .reduce_dtype = at::kDouble},
                         .offload = {.to_cpu = true}};
    if (how.by_replicate) {
      for (const auto& block : *model->blocks) replicate(*block, mesh, options);
      replicate(*model, mesh, options);
    } else {
      options.shard_placement = [](const std::string&, const at::Tensor& p) { return Shard{p.dim() - 1}; };
      shard_by_blocks(model, mesh, options);
    }
    ShardState& state = *shard_state_of(*model);
    optim::SGD optimizer = sgd(model);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor mine = shared_tokens(step).chunk(ranks)[static_cast<std::size_t>(world.rank())];
      for (int micro = 0; micro < how.microbatches; ++micro) {
        const bool last = micro + 1 == how.microbatches;
        state.set_requires_gradient_sync(last);
        state.set_reshard_after_backward(last || !how.keep_gathered);
        (loss_of(model, mine.chunk(how.microbatches)[static_cast<std::size_t>(micro)]) / how.microbatches)
            .backward();
      }
      const double norm = optim::clip_grad_norm(optimizer.parameters(), kLimit).value();
      EXPECT_NEAR(norm, expected.norms[static_cast<std::size_t>(step)], 2e-6 * norm);
      optimizer.step();
    }
    for (const auto& item : named(model)) {
      EXPECT_EQ(item.tensor.scalar_type(), at::kDouble);
      EXPECT_LT(
          (full_tensor(item.tensor.detach()) - expected.parameters.at(item.name)).abs().max().item<double>(),
          2e-6)
          << item.name;
    }
  });
}

TEST(Together, UnevenLastDimAccumulatedClippedOffloadedMixed) {
  check_together({.name = "three ranks", .shape = {3}, .microbatches = 2, .keep_gathered = false});
  check_together(
      {.name = "three ranks, kept gathered", .shape = {3}, .microbatches = 4, .keep_gathered = true});
}
TEST(Together, WithReplicas) {
  check_together({.name = "two by two", .shape = {2, 2}, .microbatches = 3, .keep_gathered = false});
}
TEST(Together, WithASliceKept) {
  check_together({.name = "four ranks",
                  .shape = {4},
                  .microbatches = 3,
                  .keep_gathered = false,
                  .reshard = ReshardTo{2}});
}
TEST(Together, Replicated) {
  check_together(
      {.name = "replicate", .shape = {3}, .microbatches = 2, .keep_gathered = false, .by_replicate = true});
}

// ---- tensor parallel inside replicas of shards ----

void check_replicas_of_shards(const Plan& plan, const ShardOptions& options = {}) {
  alone();
  comm::run_ranks(8, 120s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2, 2}, {"replicas", "shards", "tp"});
    const comm::MeshGroups tp = mesh.with_mesh(mesh.mesh()["tp"]),
                           dp = mesh.with_mesh(mesh.mesh().slice({"replicas", "shards"}));
    Model model = same_model();
    parallelize_module(*model, tp, plan);
    distribute_module(*model, tp);
    shard_by_blocks(model, dp, options);
    const auto place = [&](const at::Tensor& tensor) { return distribute_tensor(tensor, tp, {Replicate{}}); };
    const Training ours = train_share(model, {.rank = world.rank() / 2, .ranks = 4, .place = place});
    EXPECT_EQ(placements_of(model->blocks[0]->as<BlockImpl>()->up->weight)[0], Placement(Replicate{}));
    expect_same_parameters(ours, alone());
  });
}

TEST(ReplicasOfShardsWithTensorParallel, TrainLikeOneProcess) { check_replicas_of_shards(tensor_plan()); }
TEST(ReplicasOfShardsWithTensorParallel, AlongTheLastDim) {
  check_replicas_of_shards(sequence_plan(), {.shard_placement = [](const std::string&, const at::Tensor& p) {
                             return Shard{p.dim() - 1};
                           }});
}

// ---- several axes that shard ----

// The vocabulary is not divisible by the number of ranks; the width is.
std::optional<Shard> by_width(const std::string& name, const at::Tensor&) {
  return Shard{name == "embed.weight" || name == "head.weight" ? 1 : 0};
}

// The order in which axes are named has no effect.
TEST(SeveralShardAxes, OfAPlainModel) {
  alone();
  for (const auto& axes : {std::vector<std::string>{"a", "b"}, std::vector<std::string>{"b", "a"}})
    comm::run_ranks(4, 120s, [&](comm::World& world) {
      Model model = same_model();
      shard_by_blocks(model, grid(world, {2, 2}, {"a", "b"}),
                      {.shard_placement = by_width, .shard_axes = axes});
      EXPECT_EQ(placements_of(model->norm->weight), (Placements{Shard{0}, Shard{0}}));
      expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 4}), alone());
    });
}

TEST(SeveralShardAxes, OfOneMeshWithTensorParallel) {
  alone();
  for (const auto& axes : {std::vector<std::string>{"a", "b"}, std::vector<std::string>{"b", "a"}})
    comm::run_ranks(8, 120s, [&](comm::World& world) {
      const comm::MeshGroups mesh = grid(world, {2, 2, 2}, {"a", "b", "tp"});
      Model model = same_model();
      parallelize_module(*model, mesh, tensor_plan(), {.axis = "tp"});
      distribute_module(*model, mesh);
      shard_by_blocks(model, mesh, {.shard_placement = by_width, .shard_axes = axes});
      EXPECT_EQ(placements_of(model->blocks[0]->as<BlockImpl>()->up->weight),
                (Placements{StridedShard{0, 2}, StridedShard{0, 2}, Shard{0}}));
      const auto place = [&](const at::Tensor& tensor) {
        return distribute_tensor(tensor, mesh, {Shard{0}, Shard{0}, Replicate{}});
      };
      const Training ours = train_share(model, {.place = place});
      expect_same_parameters(ours, alone());
      for (std::size_t i = 0; i < ours.losses.size(); ++i)
        EXPECT_NEAR(ours.losses[i], alone().losses[i], 1e-9);
    });
}

// The tensor-parallel axis is between the two.
TEST(SeveralShardAxes, AroundTheTensorParallelOne) {
  alone();
  comm::run_ranks(8, 120s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2, 2}, {"a", "tp", "b"});
    Model model = same_model();
    parallelize_module(*model, mesh, tensor_plan(), {.axis = "tp"});
    distribute_module(*model, mesh);
    shard_by_blocks(model, mesh, {.shard_placement = by_width, .shard_axes = {"a", "b"}});
    const auto place = [&](const at::Tensor& tensor) {
      return distribute_tensor(tensor, mesh, {Shard{0}, Replicate{}, Shard{0}});
    };
    expect_same_parameters(train_share(model, {.place = place}), alone());
  });
}

TEST(SeveralShardAxes, ReplicatingAndShardingOnesOfOneMesh) {
  alone();
  comm::run_ranks(8, 120s, [&](comm::World& world) {
    // Not in the order of a two-axis mesh.
    const comm::MeshGroups mesh = grid(world, {2, 2, 2}, {"shards", "replicas", "tp"});
    Model model = same_model();
    parallelize_module(*model, mesh, tensor_plan(), {.axis = "tp"});
    distribute_module(*model, mesh);
    shard_by_blocks(model, mesh, {.shard_axes = {"shards"}, .replicate_axes = {"replicas"}});
    EXPECT_EQ(placements_of(model->blocks[0]->as<BlockImpl>()->up->weight),
              (Placements{StridedShard{0, 2}, Replicate{}, Shard{0}}));
    const auto place = [&](const at::Tensor& tensor) {
      return distribute_tensor(tensor, mesh, {Shard{0}, Shard{0}, Replicate{}});
    };
    expect_same_parameters(train_share(model, {.place = place}), alone());
  });
}

TEST(SeveralShardAxes, UnevenOnesSayWhatToChange) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    Model model = same_model();
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           fully_shard(*model, grid(world, {2, 2}, {"a", "b"}), {.shard_axes = {"a", "b"}});
                         }),
                         "flatten the shard axes"));
  });
}

}  // namespace sharded_parity_test
}  // namespace penstock
