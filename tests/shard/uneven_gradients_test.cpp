// Ranks that differ in which gradients they have, under replicate(), fully_shard and replicas of shards,
// compared with one process that sees all samples.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <random>

#include "penstock/dtensor.h"
#include "penstock/fully_shard.h"
#include "penstock/optimizer.h"

namespace penstock {
namespace uneven_gradients_test {

using namespace std::chrono_literals;

// Parameters of random shapes; a sample uses a random subset of them, different on every rank, in every
// microbatch and step. The first is always used, so that every rank has a backward.
struct RandomModel : torch::nn::Module {
  RandomModel(std::uint64_t seed, int the_ranks) : random(seed), ranks(the_ranks) {
    const int count = draw(2, 6);
    for (int i = 0; i < count; ++i) {
      std::vector<std::int64_t> shape;
      for (int dim = draw(1, 3); dim > 0; --dim) shape.push_back(draw(1, 4));
      const at::Tensor value =
          at::rand(shape, at::detail::createCPUGenerator(seed * 100 + static_cast<std::uint64_t>(i))) - 0.5;
      parameters_.push_back(
          register_parameter("p" + std::to_string(i), value, /*requires_grad=*/i == 0 || draw(0, 6) != 0));
      chance.push_back(i == 0 ? 10 : draw(0, 4) == 0 ? 0 : draw(1, 9));
    }
    microbatches = draw(1, 3);
    steps = draw(2, 3);
    reduce_each = draw(0, 1) == 1;
    adam = draw(0, 1) == 1;
    for (int i = 0; i < steps * microbatches * ranks * count; ++i)
      used.push_back(draw(1, 10) <= chance[static_cast<std::size_t>(i % count)]);
    factors = at::rand({steps, microbatches, ranks, count, 2}, at::detail::createCPUGenerator(seed)) * 2 - 1;
  }
  int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

  at::Tensor loss(int step, int microbatch, int rank) {
    at::Tensor sum;
    const auto count = static_cast<int>(parameters_.size());
    for (int k = 0; k < count; ++k) {
      if (!used[static_cast<std::size_t>(((step * microbatches + microbatch) * ranks + rank) * count + k)])
        continue;
      const at::Tensor f = factors[step][microbatch][rank][k];
      const at::Tensor term = (parameters_[static_cast<std::size_t>(k)] * f[0] + f[1]).tanh().sum();
      sum = sum.defined() ? sum + term : term;
    }
    return sum / microbatches;
  }
  std::unique_ptr<optim::Optimizer> optimizer() const {
    std::vector<optim::NamedParameter> named;
    for (const auto& entry : named_parameters()) named.push_back({entry.key(), entry.value()});
    // Weight decay shows whether a parameter was stepped, even if its gradient is zero.
    if (adam)
      return std::make_unique<optim::AdamW>(named, optim::AdamWOptions{.lr = 0.05,
                                                                       .beta1 = 0.9,
                                                                       .beta2 = 0.99,
                                                                       .eps = 1e-2,
                                                                       .weight_decay = 0.1,
                                                                       .kernels = optim::Kernels::Foreach});
    return std::make_unique<optim::SGD>(named, optim::SGDOptions{.lr = 0.1,
                                                                 .momentum = 0.9,
                                                                 .nesterov = false,
                                                                 .weight_decay = 0.1,
                                                                 .decoupled = false,
                                                                 .kernels = optim::Kernels::Foreach});
  }

  std::mt19937_64 random;
  int ranks, microbatches = 1, steps = 1;
  bool reduce_each = false, adam = false;
  std::vector<at::Tensor> parameters_;
  std::vector<int> chance;
  std::vector<bool> used;
  at::Tensor factors;
};

struct Expected {
  at::Tensor value;
  bool stepped;
};

// By step and parameter.
std::vector<std::vector<Expected>> one_process(std::uint64_t seed, int ranks) {
  RandomModel model(seed, ranks);
  const auto optimizer = model.optimizer();
  std::vector<std::vector<Expected>> steps;
  for (int step = 0; step < model.steps; ++step) {
    optimizer->zero_grad();
    for (int microbatch = 0; microbatch < model.microbatches; ++microbatch)
      for (int rank = 0; rank < ranks; ++rank) (model.loss(step, microbatch, rank) / ranks).backward();
    optimizer->step();
    auto& after = steps.emplace_back();
    for (const at::Tensor& parameter : model.parameters_)
      after.push_back({parameter.detach().clone(), parameter.grad().defined()});
  }
  return steps;
}

enum class Kind { Replicate, Shard, Hybrid };

void check(Kind kind, int ranks, int cases) {
  int lacking = 0, nobody = 0;
  std::mutex mutex;
  std::vector<std::vector<std::vector<Expected>>> expected;
  for (int c = 0; c < cases; ++c)
    expected.push_back(one_process(static_cast<std::uint64_t>(1000 * ranks + c), ranks));
  comm::run_ranks(ranks, 120s, [&](comm::World& world) {
    const std::vector<std::int64_t> shape =
        kind == Kind::Hybrid ? std::vector<std::int64_t>{2, ranks / 2} : std::vector<std::int64_t>{ranks};
    const std::vector<std::string> names = kind == Kind::Hybrid
                                               ? std::vector<std::string>{"replicas", "shards"}
                                               : std::vector<std::string>{"dp"};
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", shape, names, world.rank(), ranks));
    for (int c = 0; c < cases; ++c) {
      RandomModel model(static_cast<std::uint64_t>(1000 * ranks + c), ranks);
      const auto state = kind == Kind::Replicate ? replicate(model, mesh) : fully_shard(model, mesh);
      model.parameters_ = model.parameters();
      const auto optimizer = model.optimizer();
      for (int step = 0; step < model.steps; ++step) {
        optimizer->zero_grad();
        std::vector<bool> here(model.parameters_.size(), false);
        for (int microbatch = 0; microbatch < model.microbatches; ++microbatch) {
          state->set_requires_gradient_sync(model.reduce_each || microbatch + 1 == model.microbatches);
          model.loss(step, microbatch, world.rank()).backward();
          for (std::size_t k = 0; k < here.size(); ++k)
            here[k] =
                here[k] || model.used[static_cast<std::size_t>(
                                          ((step * model.microbatches + microbatch) * ranks + world.rank()) *
                                          static_cast<int>(here.size())) +
                                      k];
        }
        optimizer->step();
        for (std::size_t k = 0; k < here.size(); ++k) {
          const Expected& wanted = expected[static_cast<std::size_t>(c)][static_cast<std::size_t>(step)][k];
          const at::Tensor parameter = model.parameters_[k];
          const at::Tensor whole =
              is_dtensor(parameter) ? full_tensor(parameter.detach()) : parameter.detach();
          const std::string what = "case " + std::to_string(c) + ", step " + std::to_string(step) +
                                   ", parameter " + std::to_string(k);
          EXPECT_EQ(parameter.grad().defined(), wanted.stepped) << what;
          EXPECT_TRUE(at::allclose(whole, wanted.value, 1e-5, 1e-6)) << what;
          const std::lock_guard lock(mutex);
          lacking += wanted.stepped && !here[k];
          nobody += !wanted.stepped;
        }
      }
    }
  });
  // Checks that the cases are what they claim to be.
  EXPECT_GT(lacking, cases);
  EXPECT_GT(nobody, cases);
}

TEST(UnevenGradients, ReplicasAreOneProcess) {
  check(Kind::Replicate, 2, 25);
  check(Kind::Replicate, 3, 25);
}

TEST(UnevenGradients, ShardsAreOneProcess) {
  check(Kind::Shard, 2, 25);
  check(Kind::Shard, 3, 25);
}

TEST(UnevenGradients, ReplicasOfShardsAreOneProcess) { check(Kind::Hybrid, 4, 25); }

}  // namespace uneven_gradients_test
}  // namespace penstock
