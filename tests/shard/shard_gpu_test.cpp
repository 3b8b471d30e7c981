// Sharded training on a GPU: one rank, so that nothing is split, but gathered, cast, reduced and freed as with many.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>

#include "penstock/dtensor/dtensor.h"
#include "penstock/shard/fully_shard.h"
#include "tests/shard/sharded_training.h"

namespace penstock {
namespace shard_gpu_test {

using namespace std::chrono_literals;
using namespace penstock::test;

const at::Device kDevice(at::kCUDA, 0);

struct Losses {
  std::vector<double> values;
  std::map<std::string, at::Tensor> parameters;
};

Losses train(comm::World& world, bool sharded, const ShardOptions& options) {
  Model model = same_model();
  model->to(at::kFloat);
  model->to(kDevice);
  const comm::MeshGroups mesh(world, init_device_mesh("cuda", {world.size()}, {"dp"}, Rank{world.rank()}, world.size()));
  if (sharded) shard_by_blocks(model, mesh, options);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Losses seen;
  for (int step = 0; step < 4; ++step) {
    const at::Tensor tokens = shared_tokens(step).to(kDevice);
    optimizer.zero_grad();
    const at::Tensor logits = model->forward(tokens).to(at::kFloat);
    const at::Tensor loss = nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), tokens.roll(1, 1).reshape({-1}));
    loss.backward();
    optimizer.step();
    seen.values.push_back(loss.item<double>());
  }
  for (const auto& item : model->named_parameters()) seen.parameters[item.key()] = (is_dtensor(item.value()) ? full_tensor(item.value().detach()) : item.value().detach()).cpu().clone();
  return seen;
}

TEST(ShardOnAGpu, TrainsAsWithoutSharding) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const Losses plain = train(world, false, {}), sharded = train(world, true, {});
    for (std::size_t i = 0; i < plain.values.size(); ++i) EXPECT_NEAR(sharded.values[i], plain.values[i], 1e-5 * plain.values[i]);
    for (const auto& [name, value] : plain.parameters) EXPECT_TRUE(at::allclose(sharded.parameters.at(name), value, 1e-4, 1e-5)) << name;
  });
}

TEST(ShardOnAGpu, LowPrecisionAndOffload) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const Losses plain = train(world, false, {});
    ShardOptions options;
    options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = {}};
    const Losses low = train(world, true, options);
    for (std::size_t i = 0; i < plain.values.size(); ++i) {
      EXPECT_NE(low.values[i], plain.values[i]);
      EXPECT_NEAR(low.values[i], plain.values[i], 0.03 * plain.values[i]);
    }
    options = {};
    options.offload = {.to_cpu = true, .pin_memory = true};
    const Losses offloaded = train(world, true, options);
    for (std::size_t i = 0; i < plain.values.size(); ++i) EXPECT_NEAR(offloaded.values[i], plain.values[i], 1e-4 * plain.values[i]);
  });
}

// Each group's gradients travel while backward goes on; when it has ended they are there, in page-locked memory, and add up over backwards.
TEST(ShardOnAGpu, OffloadedGradientsAreThereWhenBackwardEnds) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {1}, {"dp"}, Rank{0}, 1));
    for (const bool pinned : {true, false}) {
      Model model = same_model(), plain = same_model();
      for (Model* each : {&model, &plain}) {
        (*each)->to(at::kFloat);
        (*each)->to(kDevice);
      }
      shard_by_blocks(model, mesh, {.offload = {.to_cpu = true, .pin_memory = pinned}});
      shard_state_of(*model)->set_gradient_divide_factor(2);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor tokens = shared_tokens(step).to(kDevice);
        (model->forward(tokens).pow(2).mean() * 2).backward();
        plain->forward(tokens).pow(2).mean().backward();
        const auto expected = plain->named_parameters();
        for (const auto& item : model->named_parameters()) {
          const at::Tensor gradient = to_local(item.value().grad());
          EXPECT_TRUE(gradient.device().is_cpu()) << item.key();
          if (step == 0) {
            EXPECT_EQ(gradient.is_pinned(), pinned) << item.key();
          }
          EXPECT_TRUE(at::allclose(gradient, expected[item.key()].grad().cpu(), 1e-4, 1e-6)) << item.key() << ", step " << step;
        }
      }
    }
  });
}

}  // namespace shard_gpu_test
}  // namespace penstock
