// Sharded training on a GPU: with one rank, where nothing is split but gathered, cast, reduced and freed as
// with many; and with several ranks that share the GPU, whose collectives use host memory.
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/torch.h>

#include <map>
#include <string>

#include "penstock/comm/backend/backend.h"
#include "penstock/dtensor.h"
#include "penstock/fake.h"
#include "penstock/fully_shard.h"
#include "penstock/random.h"
#include "penstock/shard/pieces/encoded_parameter.h"
#include "penstock/shard_options.h"
#include "penstock/torch/compat/streams.h"
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

// Sharded: every rank has its rows of the batch.
Losses train(comm::World& world, bool sharded, const ShardOptions& options, int replicas = 1) {
  Model model = same_model();
  model->to(at::kFloat);
  model->to(kDevice);
  const comm::MeshGroups mesh(
      world, replicas == 1 ? init_device_mesh("cuda", {world.size()}, {"dp"}, world.rank(), world.size())
                           : init_device_mesh("cuda", {replicas, world.size() / replicas}, {"replicas", "dp"},
                                              world.rank(), world.size()));
  if (sharded) shard_by_blocks(model, mesh, options);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Losses seen;
  for (int step = 0; step < 4; ++step) {
    const at::Tensor tokens =
        sharded ? shared_tokens(step).chunk(world.size())[static_cast<std::size_t>(world.rank())].to(kDevice)
                : shared_tokens(step).to(kDevice);
    optimizer.zero_grad();
    const at::Tensor logits = model->forward(tokens).to(at::kFloat);
    const at::Tensor loss =
        nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), tokens.roll(1, 1).reshape({-1}));
    loss.backward();
    optimizer.step();
    seen.values.push_back(loss.item<double>());
  }
  for (const auto& item : model->named_parameters())
    seen.parameters[item.key()] =
        (is_dtensor(item.value()) ? full_tensor(item.value().detach()) : item.value().detach()).cpu().clone();
  return seen;
}

TEST(ShardOnAGpu, TrainsAsWithoutSharding) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const Losses plain = train(world, false, {}), sharded = train(world, true, {});
    for (std::size_t i = 0; i < plain.values.size(); ++i)
      EXPECT_NEAR(sharded.values[i], plain.values[i], 1e-5 * plain.values[i]);
    for (const auto& [name, value] : plain.parameters)
      EXPECT_TRUE(at::allclose(sharded.parameters.at(name), value, 1e-4, 1e-5)) << name;
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
    for (std::size_t i = 0; i < plain.values.size(); ++i)
      EXPECT_NEAR(offloaded.values[i], plain.values[i], 1e-4 * plain.values[i]);
  });
}

// Each group's gradients are copied while backward continues; when it has ended they are in page-locked
// memory, and accumulate over backwards.
TEST(ShardOnAGpu, OffloadedGradientsAreThereWhenBackwardEnds) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {1}, {"dp"}, 0, 1));
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
          EXPECT_TRUE(at::allclose(gradient, expected[item.key()].grad().cpu(), 1e-4, 1e-6))
              << item.key() << ", step " << step;
        }
      }
    }
  });
}

// ---- page-locked memory ----

struct Layers : nn::Module {
  Layers() {
    first = register_module("first", nn::Linear(24, 40));
    second = register_module("second", nn::Linear(40, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  nn::Linear first{nullptr}, second{nullptr};
};

void fill_by_key(const std::string& name, const at::Tensor& shard, const GlobalBox& box) {
  keyed_uniform_(shard, {.seed = 11, .layer = layer_from_name(name), .purpose = purpose::kInit}, -1, 1, box);
}

TEST(ShardOnAGpu, DeferredOffloadedShardsArePinned) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {1}, {"dp"}, 0, 1));
    Layers plain;
    {
      const at::NoGradGuard no_grad;
      for (const auto& item : plain.named_parameters()) fill_by_key(item.key(), item.value(), {});
    }
    plain.to(kDevice);
    for (const bool pinned : {true, false}) {
      DeferredInit deferred;
      std::shared_ptr<Layers> model;
      {
        ModeGuard guard(deferred);
        model = std::make_shared<Layers>();
      }
      fully_shard(*model, mesh, {.offload = {.to_cpu = true, .pin_memory = pinned}});
      materialize_shards(*model, fill_by_key, kDevice);
      for (const auto& item : model->named_parameters()) {
        const at::Tensor local = to_local(item.value().detach());
        EXPECT_TRUE(local.device().is_cpu()) << item.key();
        EXPECT_EQ(local.is_pinned(), pinned) << item.key();
      }
      const at::Tensor x = at::randn({5, 24}, at::TensorOptions(kDevice));
      const at::Tensor out = model->forward(x);
      EXPECT_TRUE(at::allclose(out, plain.forward(x), 1e-5, 1e-6));
      plain.zero_grad();
      plain.forward(x).pow(2).sum().backward();
      out.pow(2).sum().backward();
      const auto expected = plain.named_parameters();
      for (const auto& item : model->named_parameters())
        EXPECT_TRUE(
            at::allclose(to_local(item.value().grad()), expected[item.key()].grad().cpu(), 1e-4, 1e-5))
            << item.key();
    }
  });
}

TEST(ShardOnAGpu, PinnedShardsStayWhereTheyAreAfterALoad) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {1}, {"dp"}, 0, 1));
    Layers model;
    model.to(kDevice);
    const auto state = fully_shard(model, mesh, {.offload = {.to_cpu = true}});
    at::Tensor weight = model.first->weight;
    const at::Tensor before = to_local(weight.detach());
    ASSERT_TRUE(before.is_pinned());
    const auto check = [&](const at::Tensor& value) {
      const at::Tensor now = to_local(weight.detach());
      EXPECT_EQ(now.data_ptr(), before.data_ptr());
      EXPECT_TRUE(now.is_pinned());
      EXPECT_TRUE(at::equal(now, value));
      state->unshard();
      EXPECT_TRUE(weight.is_cuda());
      EXPECT_TRUE(at::equal(weight.detach().cpu(), value));
      state->reshard();
    };
    check(before.clone());
    const at::Tensor value = at::randn({40, 24});
    load_whole(weight, value);
    check(value);
    weight.set_data(distribute_tensor(value * 2, mesh, {Shard{0}}, {.source_axis_rank = std::nullopt}));
    reset_sharded_parameters(model);
    check(value * 2);
  });
}

// ---- streams ----

constexpr std::int64_t kWide =
    8192;  // a weight of 256 MiB: copies and products take milliseconds, starting them microseconds

// The copy of an offloaded group to the device runs while the compute stream does unrelated work.
TEST(ShardOnAGpu, GathersRunBesideTheComputation) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {1}, {"dp"}, 0, 1));
    nn::Linear layer(nn::LinearOptions(kWide, kWide).bias(false));
    layer->to(kDevice);
    const at::Tensor value = layer->weight.detach().clone();
    const auto state =
        fully_shard(*layer, mesh, {.reshard_after_forward = true, .offload = {.to_cpu = true}});
    state->unshard();
    state->reshard();
    ASSERT_TRUE(state->gather_stream().has_value());
    const c10::Stream gathers = *state->gather_stream(), computing = current_stream(kDevice);
    EXPECT_FALSE(gathers == computing);
    torch::cuda::synchronize();
    state->unshard(/*async=*/true);
    computing.synchronize();
    EXPECT_FALSE(gathers.query()) << "the copy should still be running, on the stream of gathers";
    // Work that uses the group waits for it.
    const at::Tensor x = at::randn({16, kWide}, at::TensorOptions(kDevice));
    EXPECT_TRUE(at::equal(layer(x), at::linear(x, value)));
    for (int i = 0; i < 5; ++i) {
      state->reshard();
      EXPECT_TRUE(at::equal(layer(x), at::linear(x, value))) << "memory that is used again, " << i;
    }
    state->reshard();
    state->set_own_streams(false);
    EXPECT_FALSE(state->gather_stream().has_value());
    EXPECT_TRUE(at::equal(layer(x), at::linear(x, value)));
  });
}

// The host is far ahead of the device when backward returns. Work enqueued on the compute stream after that
// still sees the gradients.
TEST(ShardOnAGpu, ReductionsRunBesideTheComputation) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {1}, {"dp"}, 0, 1));
    nn::Sequential model, plain;
    for (int i = 0; i < 3; ++i) {
      model->push_back(nn::Linear(nn::LinearOptions(kWide, kWide).bias(false)));
      plain->push_back(nn::Linear(nn::LinearOptions(kWide, kWide).bias(false)));
    }
    for (nn::Sequential* each : {&model, &plain}) {
      (*each)->to(kDevice);
      const at::NoGradGuard no_grad;
      std::uint64_t seed = 1;
      for (at::Tensor& p : (*each)->parameters())
        p.copy_(at::randn(p.sizes(), at::detail::createCPUGenerator(seed++)) / 90);
    }
    // Reduced in another dtype, so that each gradient is cast twice and divided on the reduction stream.
    for (const auto& child : model->children())
      fully_shard(*child, mesh, {.mixed_precision = {.reduce_dtype = at::kDouble}});
    const auto state = fully_shard(*model, mesh);
    state->set_gradient_divide_factor(2);
    const at::Tensor x = at::randn({512, kWide}, at::TensorOptions(kDevice));
    plain->forward(x).pow(2).mean().backward();
    const auto expected = plain->parameters();
    for (int step = 0; step < 4; ++step) {
      for (const at::Tensor& p : model->parameters()) p.mutable_grad().reset();
      torch::cuda::synchronize();
      (model->forward(x).pow(2).mean() * 2).backward();
      ASSERT_TRUE(state->reduce_stream().has_value());
      EXPECT_FALSE(state->reduce_stream()->query()) << "reductions should still be running";
      std::vector<at::Tensor> taken;
      for (const at::Tensor& p : model->parameters()) taken.push_back(to_local(p.grad()).clone());
      for (std::size_t i = 0; i < taken.size(); ++i)
        EXPECT_TRUE(at::allclose(taken[i], expected[i].grad(), 1e-4, 1e-7))
            << "parameter " << i << ", step " << step;
    }
  });
}

// The device reads offloaded shards some time after the host enqueued it; a write on the host still happens
// later.
TEST(ShardOnAGpu, WritesOfOffloadedShardsWaitForGathersThatReadThem) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cuda", {1}, {"dp"}, 0, 1));
    const at::NoGradGuard no_grad;
    nn::Linear layer(nn::LinearOptions(1024, 1024).bias(false));
    layer->to(kDevice);
    const at::Tensor x = at::randn({16, 1024}, at::TensorOptions(kDevice)),
                     expected = at::linear(x, layer->weight.detach().clone());
    const auto state = fully_shard(*layer, mesh, {.offload = {.to_cpu = true}});
    state->unshard();
    state->reshard();
    at::Tensor busy = at::randn({kWide, kWide}, at::TensorOptions(kDevice));
    for (const bool by_optimizer : {false, true}) {
      const at::Tensor value = to_local(layer->weight.detach()).clone();
      torch::cuda::synchronize();
      for (int i = 0; i < 20; ++i) busy = at::mm(busy, busy) / kWide;
      const at::Tensor out = layer(x);  // enqueued after all of that
      state->reshard();
      if (by_optimizer) {
        ensure_sharded(layer->weight);
        to_local(layer->weight.detach()).zero_();  // like kernels that write memory
      } else {
        layer->weight.zero_();
      }
      EXPECT_TRUE(at::allclose(out, expected, 1e-4, 1e-5))
          << (by_optimizer ? "ensure_sharded" : "an operator");
      load_whole(layer->weight, value);
    }
  });
}

// Gathered parameters that stay in 8 bits give the same results as decoded ones.
TEST(ShardOnAGpu, ParametersThatStayEncoded) {
  comm::run_ranks(1, 120s, [](comm::World& world) {
    const auto with = [](bool keep) {
      ShardOptions options;
      options.extension = [keep](const std::string&, const at::Tensor& p) {
        return p.dim() == 2 ? int8_gather({.block = 64, .keep_encoded = keep}) : nullptr;
      };
      return options;
    };
    const Losses decoded = train(world, true, with(false)), kept = train(world, true, with(true));
    for (std::size_t i = 0; i < decoded.values.size(); ++i)
      EXPECT_NEAR(kept.values[i], decoded.values[i], 1e-5 * decoded.values[i]);
    for (const auto& [name, value] : decoded.parameters)
      EXPECT_TRUE(at::allclose(kept.parameters.at(name), value, 1e-4, 1e-5)) << name;
  });
}

}  // namespace shard_gpu_test
}  // namespace penstock
