// Optimizers, clipping and checkpoints on shards: equal to one process, for any number of ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <string>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/load.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/dtensor.h"
#include "penstock/fully_shard.h"
#include "penstock/gradients.h"
#include "penstock/optimizer.h"
#include "tests/checkpoint/file_ranks.h"
#include "tests/shard/sharded_training.h"

namespace penstock {
namespace sharded_optimizer_test {

using namespace std::chrono_literals;
using namespace penstock::test;

constexpr double kLimit = 0.2;  // small enough that every step is clipped

comm::MeshGroups line(comm::World& world) {
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size())};
}

std::vector<optim::NamedParameter> named(const Model& model) {
  std::vector<optim::NamedParameter> result;
  for (const auto& item : model->named_parameters()) result.push_back({item.key(), item.value()});
  return result;
}

struct Clipped {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> parameters;
};

std::unique_ptr<optim::Optimizer> make(bool adam, const Model& model) {
  if (adam)
    return std::make_unique<optim::AdamW>(optim::decay_groups(named(model)),
                                          optim::AdamWOptions{.lr = 1e-2, .weight_decay = 0.1});
  return std::make_unique<optim::SGD>(optim::decay_groups(named(model)),
                                      optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
}

double one_step(Model& model, optim::Optimizer& optimizer, int step, int rank, int ranks,
                std::vector<double>& norms) {
  const at::Tensor tokens = shared_tokens(step).chunk(ranks)[static_cast<std::size_t>(rank)];
  optimizer.zero_grad();
  const at::Tensor loss = nn::functional::cross_entropy(model->forward(tokens).reshape({-1, kVocabulary}),
                                                        tokens.roll(1, 1).reshape({-1}));
  loss.backward();
  norms.push_back(optim::clip_grad_norm(optimizer.parameters(), kLimit).value());
  optimizer.step();
  return loss.item<double>();
}

Clipped train(Model model, bool adam, int rank, int ranks, int steps = 3) {
  const auto optimizer = make(adam, model);
  Clipped run;
  for (int step = 0; step < steps; ++step)
    run.losses.push_back(one_step(model, *optimizer, step, rank, ranks, run.norms));
  for (const auto& item : named(model))
    run.parameters[item.name] =
        is_dtensor(item.tensor) ? full_tensor(item.tensor.detach()) : item.tensor.detach().clone();
  return run;
}

void expect_same(const Clipped& ours, const Clipped& theirs) {
  for (std::size_t i = 0; i < theirs.norms.size(); ++i)
    EXPECT_NEAR(ours.norms[i], theirs.norms[i], 1e-9 * theirs.norms[i]);
  for (const auto& [name, value] : theirs.parameters)
    EXPECT_LT((ours.parameters.at(name) - value).abs().max().item<double>(), 1e-9) << name;
}

TEST(ShardedOptimizer, StepsAndClipsLikeOneProcess) {
  for (const bool adam : {true, false}) {
    const Clipped alone = train(same_model(), adam, 0, 1);
    EXPECT_GT(alone.norms[0], kLimit);
    for (const int ranks : {2, 3})
      comm::run_ranks(ranks, 60s, [&](comm::World& world) {
        Model model = same_model();
        shard_by_blocks(model, line(world));
        expect_same(train(model, adam, world.rank(), ranks), alone);
      });
  }
}

TEST(ShardedOptimizer, ParametersThatAreStillGatheredAreShardedFirst) {
  const Clipped alone = train(same_model(), true, 0, 1);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world));
    shard_state_of(*model)->set_reshard_after_backward(false);
    expect_same(train(model, true, world.rank(), 2), alone);
  });
}

// An evaluation leaves the root gathered, in the compute dtype.
TEST(ShardedOptimizer, StateThatIsMadeAfterAnEvaluationIsThatOfTheShards) {
  const Clipped alone = train(same_model(), true, 0, 1, 1);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    for (const bool low : {false, true}) {
      Model model = same_model();
      ShardOptions options;
      if (low) options.mixed_precision.param_dtype = at::kFloat;
      const auto root = fully_shard(*model, line(world), options);
      const auto gather = [&] {
        const at::NoGradGuard no_grad;
        if (low)
          root->unshard();
        else
          model->forward(shared_tokens(0));
        EXPECT_FALSE(is_dtensor(model->head->weight));
      };
      const auto optimizer = make(true, model);
      gather();
      optimizer->ensure_state();
      const optim::OptimizerState state = optimizer->state();
      std::map<std::string, at::Tensor> parameters;
      for (const auto& item : named(model)) parameters[item.name] = item.tensor;
      EXPECT_EQ(state.tensors.size(), 2 * parameters.size());
      for (const optim::NamedTensor& entry : state.tensors) {
        ASSERT_TRUE(is_dtensor(entry.tensor)) << entry.name;
        EXPECT_EQ(entry.tensor.scalar_type(), at::kDouble) << entry.name;
        // "optimizer.<parameter>.<kind>"
        const std::size_t begin = entry.name.find('.') + 1, end = entry.name.rfind('.');
        const at::Tensor& parameter = parameters.at(entry.name.substr(begin, end - begin));
        EXPECT_EQ(placements_of(entry.tensor), placements_of(parameter)) << entry.name;
      }
      // Loading finds the same layout, whatever state the group is in.
      gather();
      optimizer->load_state(state);
      for (const optim::NamedTensor& entry : optimizer->state().tensors)
        EXPECT_TRUE(is_dtensor(entry.tensor)) << entry.name;
      if (low) continue;
      Clipped run;
      one_step(model, *optimizer, 0, world.rank(), 2, run.norms);
      for (const auto& item : named(model)) run.parameters[item.name] = full_tensor(item.tensor.detach());
      expect_same(run, alone);
    }
  });
}

// No rank ever holds the whole model; what three ranks wrote is read by two, four and one.
TEST(ShardedOptimizer, CheckpointsFromShardsIntoOtherShards) {
  const checkpoint::test::TemporaryFolder folder;
  const auto contents = [](const std::vector<optim::NamedParameter>& parameters,
                           const optim::Optimizer& optimizer) {
    checkpoint::CheckpointContents all;
    for (const auto& each : parameters) all.model.push_back(checkpoint::tensor_part(each.name, each.tensor));
    for (const auto& each : optimizer.state().tensors)
      all.optimizer.push_back(checkpoint::tensor_part(each.name, each.tensor));
    all.state_json = "{}";
    return all;
  };
  std::mutex mutex;
  std::vector<double> wanted;  // losses of the following steps
  comm::run_ranks(3, 60s, [&](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world));
    const auto optimizer = make(true, model);
    std::vector<double> norms;
    for (int step = 0; step < 2; ++step) one_step(model, *optimizer, step, world.rank(), 3, norms);
    checkpoint::CheckpointWriter writer(world, folder.path());
    writer.save(2, contents(named(model), *optimizer));
    writer.wait();
    norms.clear();
    for (int step = 2; step < 4; ++step) one_step(model, *optimizer, step, world.rank(), 3, norms);
    const std::lock_guard lock(mutex);
    wanted = norms;
  });
  for (const int ranks : {1, 2, 4})
    comm::run_ranks(ranks, 60s, [&](comm::World& world) {
      Model model = same_model();
      {
        const torch::NoGradGuard no_grad;
        for (const at::Tensor& parameter : model->parameters()) parameter.zero_();
      }
      if (ranks > 1) shard_by_blocks(model, line(world));
      const auto optimizer = make(true, model);
      optimizer->ensure_state();
      checkpoint::WorldAgreement agreement(world);
      const checkpoint::Checkpoint read =
          checkpoint::open_checkpoint(agreement, folder.path() / "step-00000002");
      const auto into = contents(named(model), *optimizer);
      checkpoint::load_into(agreement, read, checkpoint::Section::Model, into.model);
      checkpoint::load_into(agreement, read, checkpoint::Section::Optimizer, into.optimizer);
      auto steps = optimizer->state().steps;
      for (auto& each : steps) each.steps = 2;
      optimizer->set_steps(steps);
      std::vector<double> norms;
      for (int step = 2; step < 4; ++step) one_step(model, *optimizer, step, world.rank(), ranks, norms);
      for (std::size_t i = 0; i < wanted.size(); ++i)
        EXPECT_NEAR(norms[i], wanted[i], 1e-9 * wanted[i]) << ranks << " ranks";
    });
}

}  // namespace sharded_optimizer_test
}  // namespace penstock
