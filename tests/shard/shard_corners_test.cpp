// Sharded parameters in code that does more than forward, backward and step: batches with any placements,
// replaced data, meshes that only look alike, forwards recomputed inside backward, weights derived from
// parameters.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/recompute.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/shard_options.h"
#include "penstock/tensor_parallel.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/compat/cpu_bfloat16.h"
#include "tests/has_text.h"
#include "tests/shard/recomputed.h"
#include "tests/shard/sharded_training.h"
#include "tests/throws.h"

namespace penstock {
namespace shard_corners_test {

using namespace std::chrono_literals;
using namespace penstock::test;

comm::MeshGroups line(comm::World& world) {
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size())};
}
comm::MeshGroups grid(comm::World& world, std::vector<std::int64_t> shape, std::vector<std::string> names) {
  return {world, init_device_mesh("cpu", shape, names, world.rank(), world.size())};
}

at::Tensor numbers(std::vector<std::int64_t> shape, std::uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble));
}

struct DenseImpl : nn::Module {
  DenseImpl(std::int64_t in, std::int64_t out, std::uint64_t seed = 1) {
    weight = register_parameter("weight", numbers({out, in}, seed));
    bias = register_parameter("bias", numbers({out}, seed + 1));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Dense);

// A leaf whose gradient keeps the placements that operators produce: distribute_parameter would make it
// whole.
void make_distributed(const at::Tensor& parameter, const comm::MeshGroups& mesh,
                      const Placements& placements) {
  const at::Tensor value =
      distribute_tensor(parameter.detach(), mesh, placements, {.source_axis_rank = std::nullopt});
  parameter.set_requires_grad(false);
  replace_data(parameter, value);
  parameter.set_requires_grad(true);
}

// ---- gradients of a distributed batch ----

TEST(DistributedBatch, GradientsDoNotDependOnItsPlacements) {
  const at::Tensor x = numbers({8, 5}, 9);
  Dense alone(5, 6);
  alone(x).pow(2).mean().backward();
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"replicas", "shards"});
    const Placement choices[] = {Placement(Replicate{}), Placement(Shard{0})};
    for (const Placement& first : choices)
      for (const Placement& second : choices)
        for (const std::optional<double> factor : {std::optional<double>(), std::optional<double>(3)}) {
          SCOPED_TRACE(fmt::format("[{}, {}], divided by {}", first.to_string(), second.to_string(),
                                   factor.value_or(0)));
          Dense layer(5, 6);
          for (const at::Tensor& p : layer->parameters())
            make_distributed(p, mesh, {Replicate{}, Replicate{}});
          const auto state = fully_shard(*layer, mesh);
          if (factor) state->set_gradient_divide_factor(*factor);
          const at::Tensor rows =
              distribute_tensor(x, mesh, {first, second}, {.source_axis_rank = std::nullopt});
          layer(rows).pow(2).mean().backward();
          EXPECT_TRUE(
              at::allclose(full_tensor(layer->weight.grad()), alone->weight.grad() / factor.value_or(1)));
          EXPECT_TRUE(at::allclose(full_tensor(layer->bias.grad()), alone->bias.grad() / factor.value_or(1)));
        }
  });
}

// ---- replaced data ----

TEST(ReplacedData, ValuesSetFromOutsideAreTakenOver) {
  const at::Tensor x = numbers({3, 5}, 4), value = numbers({7, 5}, 5);
  comm::run_ranks(3, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = line(world);
    for (const bool gathered : {false, true})
      for (const bool distributed : {false, true}) {
        SCOPED_TRACE(fmt::format("gathered {}, distributed {}", gathered, distributed));
        Dense layer(5, 7), plain(5, 7);
        const auto state = fully_shard(*layer, mesh);
        if (gathered) state->unshard();
        layer->weight.set_data(
            distributed ? distribute_tensor(value, mesh, {Shard{0}}, {.source_axis_rank = std::nullopt})
                        : value.clone());
        plain->weight.set_data(value.clone());
        for (int i = 0; i < 2; ++i) {
          EXPECT_TRUE(at::equal(layer(x), plain(x)));
          ensure_sharded(layer->parameters());
          EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value));
        }
        layer(x).sum().backward();
        plain(x).sum().backward();
        EXPECT_TRUE(at::allclose(full_tensor(layer->weight.grad()), plain->weight.grad()));
        const at::NoGradGuard no_grad;
        layer->weight.sub_(layer->weight.grad());
        EXPECT_TRUE(at::allclose(full_tensor(layer->weight), value - plain->weight.grad()));
      }
  });
}

TEST(ReplacedData, AnOptimizerOrACheckpointMayComeFirst) {
  const at::Tensor value = numbers({7, 5}, 5);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Dense layer(5, 7);
    fully_shard(*layer, line(world));
    layer->weight.set_data(value.clone());
    {
      const at::NoGradGuard no_grad;
      layer->weight.mul_(2);
    }
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value * 2));
    layer->weight.set_data(value.clone());
    ensure_sharded(layer->weight);
    EXPECT_TRUE(is_dtensor(layer->weight));
    layer->weight.set_data(value.clone());
    EXPECT_TRUE(is_dtensor(layer->weight.detach()));
    // Its own data is not a replacement.
    layer->weight.set_data(layer->weight.detach());
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value));
    {
      const UnshardedScope scope(*layer);
      layer->weight.set_data(value * 3);
    }
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value * 3));
    {
      const UnshardedScope scope(*layer);
      const at::NoGradGuard no_grad;
      layer->weight.set_data(value * 5);
      layer->weight.add_(1);
    }
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value * 5 + 1));
  });
}

// Without an operator in between.
TEST(ReplacedData, TransitionsByHand) {
  const at::Tensor value = numbers({7, 5}, 5);
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    Dense layer(5, 7);
    const auto state = fully_shard(*layer, line(world), {.reshard_after_forward = ReshardTo{2}});
    layer->weight.set_data(value.clone());
    state->unshard();
    EXPECT_TRUE(at::equal(layer->weight.detach(), value));
    layer->weight.set_data(value * 2);
    state->unshard();
    EXPECT_TRUE(at::equal(layer->weight.detach(), value * 2));
    layer->weight.set_data(value * 7);
    first_group(*state)->wait_for_unshard();
    EXPECT_TRUE(at::equal(layer->weight.detach(), value * 7));
    layer->weight.set_data(value * 3);
    state->reshard();
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value * 3));
    state->unshard();
    layer->weight.set_data(value * 4);
    first_group(*state)->reshard_after_forward();
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value * 4));
    first_group(*state)->wait_for_unshard();
    first_group(*state)->reshard_after_forward();  // keeps a slice of the old values
    layer->weight.set_data(value * 5);
    first_group(*state)->wait_for_unshard();
    EXPECT_TRUE(at::equal(layer->weight.detach(), value * 5));
  });
}

TEST(ReplacedData, WhatDoesNotFitIsRefusedAtTheNextUse) {
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"replicas", "shards"});
    const at::Tensor x = numbers({3, 5}, 4), value = numbers({7, 5}, 5);
    Dense layer(5, 7);
    fully_shard(*layer, mesh);
    layer->weight.set_data(value.t().contiguous());
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(has_text(message_of<ValueError>([&] { layer(x); }), "'weight'"));
    EXPECT_THROW(ensure_sharded(layer->weight), ValueError);
    layer->weight.set_data(
        distribute_tensor(value, mesh, {Shard{0}, Shard{0}}, {.source_axis_rank = std::nullopt}));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { layer(x); }), "[S(0), S(0)]"));
    const comm::MeshGroups other(
        world, DeviceMesh("cpu", {2, 2}, {0, 2, 1, 3}, {"replicas", "shards"}, world.rank()));
    layer->weight.set_data(
        distribute_tensor(value, other, {Replicate{}, Shard{0}}, {.source_axis_rank = std::nullopt}));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { layer(x); }), "on the same mesh"));
    layer->weight.set_data(value.clone());
    EXPECT_TRUE(at::equal(layer(x), at::linear(x, value, Dense(5, 7)->bias)));
  });
}

TEST(ReplacedData, TensorParallelValues) {
  const at::Tensor value = numbers({7, 5}, 5), x = numbers({3, 5}, 4);
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
    const comm::MeshGroups tp = mesh.with_mesh(mesh.mesh()["tp"]), dp = mesh.with_mesh(mesh.mesh()["dp"]);
    for (const bool as_before : {false, true}) {
      Dense layer(5, 7);
      for (const at::Tensor& p : layer->parameters()) distribute_parameter(p, tp, {Shard{0}});
      fully_shard(*layer, dp);
      layer->weight.set_data(
          as_before ? distribute_tensor(value, tp, {Shard{0}}, {.source_axis_rank = std::nullopt})
                    : value.clone());
      const at::Tensor y = layer(distribute_tensor(x, tp, {Replicate{}}));
      EXPECT_TRUE(at::allclose(full_tensor(y), at::linear(x, value, Dense(5, 7)->bias)));
      y.sum().backward();
      EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value));
    }
  });
}

TEST(ReplacedData, AModuleThatIsCastComputesAndTrainsInItsNewDtype) {
  ensure_cpu_bfloat16();
  const at::Tensor tokens = shared_tokens(0);
  const auto train = [&](Model& model, at::ScalarType dtype, bool zero) {
    model->to(dtype);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor out = model->forward(tokens);
      EXPECT_EQ(out.scalar_type(), dtype);
      out.pow(2).mean().backward();
      const at::NoGradGuard no_grad;
      ensure_sharded(model->parameters());
      for (at::Tensor p : model->parameters()) {
        EXPECT_EQ(p.scalar_type(), dtype);
        EXPECT_EQ(p.grad().scalar_type(), dtype);
        // Exact, so that kernels round once, whether or not an element is in the vectorized part.
        p.sub_(p.grad(), 0.125);
        if (step == 0 || zero)
          p.grad().zero_();
        else
          p.mutable_grad().reset();
      }
    }
  };
  // One process, in a thread like the ranks: Module::to leaves gradients in their old dtype there.
  std::map<at::ScalarType, std::map<std::string, at::Tensor>> expected;
  const auto dtypes = {at::kFloat, at::kBFloat16, at::kDouble};
  comm::run_ranks(1, 60s, [&](comm::World&) {
    Model alone = same_model();
    for (const at::ScalarType dtype : dtypes) {
      train(alone, dtype, false);
      for (const auto& item : alone->named_parameters())
        expected[dtype][item.key()] = item.value().detach().clone();
    }
  });
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    for (const bool grouped : {false, true})
      for (const bool no_grad : {false, true}) {
        Model model = same_model();
        if (grouped)
          shard_by_blocks(model, line(world));
        else
          fully_shard(*model, line(world));
        model->forward(tokens);  // some groups are already gathered
        for (const at::ScalarType dtype : dtypes) {
          if (no_grad) {
            const at::NoGradGuard guard;
            model->to(dtype);
          }
          train(model, dtype, grouped != no_grad);
          ensure_sharded(model->parameters());
          // Both ranks have the same rows, so rounding is the same.
          for (const auto& item : model->named_parameters())
            EXPECT_TRUE(at::equal(full_tensor(item.value().detach()), expected.at(dtype).at(item.key())))
                << item.key() << " in " << c10::toString(dtype);
        }
      }
  });
}

// The hooks at the boundaries of parallelized modules stay with their parameters: inputs and outputs are
// plain.
TEST(ReplacedData, ATensorParallelModuleThatIsCast) {
  struct Pair : nn::Module {
    Pair() {
      up = register_module("up", nn::Linear(6, 8));
      down = register_module("down", nn::Linear(8, 6));
      const at::NoGradGuard no_grad;
      std::uint64_t seed = 1;
      for (at::Tensor& p : parameters()) p.copy_(numbers(p.sizes().vec(), seed++));
      to(at::kDouble);
    }
    at::Tensor forward(const at::Tensor& x) { return down(at::relu(up(x))); }
    nn::Linear up{nullptr}, down{nullptr};
  };
  const at::Tensor x = numbers({4, 6}, 3).to(at::kFloat);
  Pair alone;
  alone.to(at::kFloat);
  const at::Tensor expected = alone.forward(x);
  expected.pow(2).mean().backward();
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
    auto model = std::make_shared<Pair>();
    parallelize_module(*model, mesh.with_mesh(mesh.mesh()["tp"]),
                       {{"up", colwise_parallel()}, {"down", rowwise_parallel()}});
    fully_shard(*model->up, mesh.with_mesh(mesh.mesh()["dp"]));
    fully_shard(*model, mesh.with_mesh(mesh.mesh()["dp"]));
    model->to(at::kFloat);
    const at::Tensor out = model->forward(x);
    EXPECT_TRUE(at::allclose(out, expected, 1e-4, 1e-4));
    out.pow(2).mean().backward();
    const auto others = alone.named_parameters();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(at::allclose(full_tensor(item.value().grad()), others[item.key()].grad(), 1e-3, 1e-4))
          << item.key();
  });
}

TEST(ReplacedData, CastBetweenForwardAndBackwardIsRefused) {
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Dense layer(5, 7);
    fully_shard(*layer, line(world));
    const at::Tensor y = layer(numbers({3, 5}, 4).set_requires_grad(true));
    layer->to(at::kFloat);
    ensure_sharded(layer->parameters());
    EXPECT_TRUE(has_text(message_of<StateError>([&] { y.sum().backward(); }), "dtype"));
  });
}

TEST(ReplacedData, WithMixedPrecisionShardsChangeAndComputationDoesNot) {
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Dense layer(5, 7), plain(5, 7);
    fully_shard(*layer, line(world), {.mixed_precision = {.param_dtype = at::kBFloat16}});
    layer->to(at::kFloat);
    plain->to(at::kFloat);
    const at::Tensor x = numbers({3, 5}, 4).to(at::kFloat);
    const at::Tensor y = layer(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(layer->weight.scalar_type(), at::kFloat);
    EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), plain->weight.detach()))
        << "not rounded to what is computed with";
    layer->to(at::kCPU);
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), plain->weight.detach()));
    {
      const at::NoGradGuard no_grad;
      layer->to(at::kFloat);
    }
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), plain->weight.detach()));
    // A cast that was modified afterwards is a new value.
    {
      const at::NoGradGuard no_grad;
      at::Tensor value = layer->weight.to(at::kDouble);
      layer->weight.set_data(value.mul_(2));
    }
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()),
                          plain->weight.detach().to(at::kBFloat16).to(at::kDouble) * 2));
    load_whole(layer->weight, plain->weight.detach());
    layer->to(at::kBFloat16);
    EXPECT_EQ(layer->weight.detach().scalar_type(), at::kBFloat16);
    ensure_sharded(layer->parameters());
    EXPECT_EQ(layer->weight.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), plain->weight.detach().to(at::kBFloat16)));
  });
}

// Parameters gathered in 8 bits are inexact; casting a module must not store that error.
TEST(ReplacedData, CastsOfEncodedParametersAreThoseOfTheirShards) {
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    for (const bool keep_encoded : {false, true}) {
      SCOPED_TRACE(keep_encoded ? "kept encoded" : "decoded");
      const at::Tensor value = numbers({7, 5}, 8), x = numbers({3, 5}, 4);
      Dense layer(5, 7);
      const at::Tensor weight = layer->weight.detach().clone();
      fully_shard(*layer, line(world), {.extension = [=](const std::string&, const at::Tensor& p) {
        return p.dim() == 2 ? int8_gather({.block = 8, .keep_encoded = keep_encoded}) : nullptr;
      }});
      const auto whole_weight = [&] {
        ensure_sharded(layer->parameters());
        return full_tensor(layer->weight.detach());
      };
      layer(x);
      layer->to(at::kDouble);
      EXPECT_TRUE(at::equal(whole_weight(), weight));
      layer->to(at::kCPU);
      EXPECT_TRUE(at::equal(whole_weight(), weight));
      layer->to(at::kFloat);
      EXPECT_TRUE(at::equal(whole_weight(), weight.to(at::kFloat)));
      EXPECT_TRUE(at::allclose(layer(x.to(at::kFloat)),
                               at::linear(x, weight, Dense(5, 7)->bias).to(at::kFloat), 0.1, 0.1));
      // Its own data is not a replacement, however it is gathered.
      layer->weight.set_data(layer->weight.detach());
      EXPECT_TRUE(at::equal(whole_weight(), weight.to(at::kFloat)));
      layer->weight.set_data(value.clone());
      EXPECT_TRUE(at::equal(whole_weight(), value));
    }
  });
}

// A trial run of a pipeline temporarily replaces the data of the parameters.
TEST(ReplacedData, IsTakenOverBeforeATrial) {
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Dense layer(5, 7);
    const at::Tensor value = numbers({7, 5}, 8).to(at::kFloat);
    const auto state = fully_shard(*layer, line(world));
    layer->to(at::kFloat);
    layer->weight.set_data(value.clone());
    first_group(*state)->begin_trial(/*fake=*/true);
    EXPECT_EQ(layer->weight.scalar_type(), at::kFloat);
    first_group(*state)->end_trial();
    ensure_sharded(layer->parameters());
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value));
    EXPECT_EQ(layer->bias.scalar_type(), at::kFloat);
  });
}

// ---- meshes that look alike ----

TEST(MeshesOfEqualNames, OtherRanksAreRefused) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
    const comm::MeshGroups other(world, DeviceMesh("cpu", {2, 2}, {0, 2, 1, 3}, {"dp", "tp"}, world.rank()));
    const auto shard_on = [&](const comm::MeshGroups& data, const ShardOptions& options) {
      Dense layer(4, 6);
      for (const at::Tensor& p : layer->parameters()) distribute_parameter(p, mesh, {Replicate{}, Shard{0}});
      fully_shard(*layer, data, options);
    };
    const std::string message = message_of<ValueError>([&] { shard_on(other, {.shard_axes = {"dp"}}); });
    EXPECT_TRUE(has_text(message, "axis 'dp' of the mesh of parameter 'weight'"));
    EXPECT_TRUE(has_text(message, "[0, 2]")) << "the parameter's";
    EXPECT_TRUE(has_text(message, "[0, 1]")) << "those of fully_shard";
    EXPECT_THROW(shard_on(other.with_mesh(other.mesh()["dp"]), {}), ValueError);
    // Another order of the same ranks is a different sharding.
    const comm::MeshGroups turned(world, DeviceMesh("cpu", {2, 2}, {2, 3, 0, 1}, {"dp", "tp"}, world.rank()));
    EXPECT_TRUE(
        has_text(message_of<ValueError>([&] { shard_on(turned, {.shard_axes = {"dp"}}); }), "axis 'dp'"));
    // Slices, and new meshes of the same ranks, have the same axes.
    shard_on(mesh.with_mesh(mesh.mesh()["dp"]), {});
    shard_on(grid(world, {2, 2}, {"dp", "tp"}), {.shard_axes = {"dp"}});
    const std::vector<int> column{world.rank() % 2, world.rank() % 2 + 2};
    shard_on(comm::MeshGroups(world, DeviceMesh("cpu", {2}, column, {"dp"}, world.rank())), {});
    // Axes that cannot be joined: the error names the parameter.
    EXPECT_TRUE(has_text(
        message_of<ValueError>([&] { shard_on(mesh.with_mesh(mesh.mesh().flatten({}, "all")), {}); }),
        "'weight'"));
  });
}

TEST(MeshesOfEqualNames, AValueOnOtherRanksIsNotAShard) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"replicas", "shards"});
    const comm::MeshGroups other(
        world, DeviceMesh("cpu", {2, 2}, {0, 2, 1, 3}, {"replicas", "shards"}, world.rank()));
    Dense layer(4, 6);
    fully_shard(*layer, mesh);
    layer->weight.set_data(distribute_tensor(numbers({6, 4}, 3), other, {Replicate{}, Shard{0}},
                                             {.source_axis_rank = std::nullopt}));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { reset_sharded_parameters(*layer); }), "[[0,2],[1,3]]"));
  });
}

TEST(MeshesOfEqualNames, AGradientOnOtherRanksIsRefused) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
    const comm::MeshGroups other(world, DeviceMesh("cpu", {2, 2}, {0, 2, 1, 3}, {"dp", "tp"}, world.rank()));
    Dense layer(4, 6);
    for (const at::Tensor& p : layer->parameters()) make_distributed(p, mesh, {Replicate{}, Shard{0}});
    fully_shard(*layer, mesh, {.shard_axes = {"dp"}});
    layer->weight.register_hook([&](const at::Tensor& gradient) {
      return distribute_tensor(full_tensor(gradient), other, {Replicate{}, Shard{0}},
                               {.source_axis_rank = std::nullopt});
    });
    const at::Tensor y = layer(distribute_tensor(numbers({2, 4}, 3), mesh, {Shard{0}, Replicate{}},
                                                 {.source_axis_rank = std::nullopt}));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { y.sum().backward(); }),
                         "the gradient of the distributed parameter 'weight'"));
  });
}

// Groups of one module on meshes with different ranks are independent of each other.
TEST(MeshesOfEqualNames, EveryGroupMayHaveItsOwn) {
  struct Chain : nn::Module {
    Chain() {
      first = register_module("first", Dense(5, 6, 1));
      second = register_module("second", Dense(6, 7, 2));
      third = register_module("third", Dense(7, 3, 3));
    }
    at::Tensor forward(const at::Tensor& x) { return third(at::tanh(second(at::tanh(first(x))))); }
    Dense first{nullptr}, second{nullptr}, third{nullptr};
  };
  const at::Tensor x = numbers({8, 5}, 9);
  Chain alone;
  alone.forward(x).pow(2).mean().backward();
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const auto on = [&](std::vector<std::int64_t> shape, std::vector<int> ranks) {
      std::vector<std::string> names{"replicas", "shards"};
      if (shape.size() == 1) names = {"shards"};
      return comm::MeshGroups(world, DeviceMesh("cpu", shape, std::move(ranks), names, world.rank()));
    };
    auto model = std::make_shared<Chain>();
    fully_shard(*model->first, on({2, 2}, {0, 1, 2, 3}));
    fully_shard(*model->second, on({2, 2}, {0, 2, 1, 3}));
    fully_shard(*model->third, on({4}, {3, 1, 0, 2}));
    fully_shard(*model, on({4}, {0, 1, 2, 3}));
    model->forward(x.chunk(4)[static_cast<std::size_t>(world.rank())]).pow(2).mean().backward();
    const auto expected = alone.named_parameters();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(at::allclose(full_tensor(item.value().grad()), expected[item.key()].grad())) << item.key();
  });
}

// ---- forwards recomputed inside backward ----

// Trains with zeroed gradients and compares every gradient with that of one process.
template <class Make, class Forward>
void check_recomputed(int ranks, const Make& make,
                      const std::function<void(decltype(make())&, comm::World&)>& shard,
                      const Forward& forward,
                      const std::function<at::Tensor(comm::World&, const at::Tensor&)>& place) {
  constexpr int kSteps = 3;
  auto alone = make();
  std::vector<std::map<std::string, at::Tensor>> expected;
  const auto step = [&](auto& model, const at::Tensor& x, auto&& check) {
    forward(model, at::Tensor(x).set_requires_grad(true)).pow(2).mean().backward();
    const at::NoGradGuard no_grad;
    ensure_sharded(model->parameters());
    for (const auto& item : model->named_parameters()) {
      check(item.key(), item.value().grad());
      at::Tensor(item.value()).sub_(item.value().grad(), 0.1);
      item.value().grad().zero_();
    }
  };
  for (int i = 0; i < kSteps; ++i) {
    expected.emplace_back();
    step(alone, numbers({8, 6}, static_cast<std::uint64_t>(i)),
         [&](const std::string& name, const at::Tensor& gradient) {
           expected.back()[name] = gradient.clone();
         });
  }
  comm::run_ranks(ranks, 60s, [&](comm::World& world) {
    auto model = make();
    shard(model, world);
    for (std::size_t i = 0; i < kSteps; ++i)
      step(model, place(world, numbers({8, 6}, i)), [&](const std::string& name, const at::Tensor& gradient) {
        ASSERT_TRUE(gradient.defined() && is_dtensor(gradient)) << name;
        EXPECT_TRUE(at::allclose(full_tensor(gradient), expected[i].at(name))) << name << ", step " << i;
      });
  });
}

struct ChainImpl : nn::Module {
  ChainImpl() {
    first = register_module("first", Dense(6, 6, 1));
    second = register_module("second", Dense(6, 6, 2));
  }
  Dense first{nullptr}, second{nullptr};
};
TORCH_MODULE(Chain);

at::Tensor chunk_of(comm::World& world, const at::Tensor& x) {
  return x.chunk(world.size())[static_cast<std::size_t>(world.rank())];
}

TEST(RecomputedForward, GradientsAreAveragedAlsoWithZeros) {
  for (const bool grouped : {false, true})
    check_recomputed(
        2, [] { return Chain(); },
        [&](Chain& model, comm::World& world) {
          if (grouped) fully_shard(*model->first, line(world)), fully_shard(*model->second, line(world));
          fully_shard(*model, line(world));
        },
        [](Chain& model, const at::Tensor& x) {
          const at::Tensor h =
              recomputed(x, [model](const at::Tensor& t) { return at::tanh(Chain(model)->first(t)); });
          return recomputed(h, [model](const at::Tensor& t) { return at::tanh(Chain(model)->second(t)); });
        },
        chunk_of);
}

// One group in two segments: the gradients of the first arrive after the group was reduced for the second,
// incompletely.
TEST(RecomputedForward, AParameterOfTwoSegments) {
  check_recomputed(
      2, [] { return Chain(); }, [](Chain& model, comm::World& world) { fully_shard(*model, line(world)); },
      [](Chain& model, const at::Tensor& x) {
        const at::Tensor h =
            recomputed(x, [model](const at::Tensor& t) { return at::tanh(Chain(model)->first(t)); });
        return recomputed(h, [model](const at::Tensor& t) {
          return at::tanh(Chain(model)->second(Chain(model)->first(t)));
        });
      },
      chunk_of);
}

TEST(RecomputedForward, TensorParallelParameters) {
  for (const bool scoped : {false, true})
    check_recomputed(
        4, [] { return Chain(); },
        [](Chain& model, comm::World& world) {
          const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
          for (const at::Tensor& p : model->parameters())
            make_distributed(p, mesh.with_mesh(mesh.mesh()["tp"]), {Shard{0}});
          fully_shard(*model->first, mesh.with_mesh(mesh.mesh()["dp"]));
          fully_shard(*model, mesh.with_mesh(mesh.mesh()["dp"]));
        },
        [=](Chain& model, const at::Tensor& x) {
          const at::Tensor h = recomputed(x, [=](const at::Tensor& t) {
            std::optional<ForwardScope> scope;
            if (scoped) scope.emplace(*model->first);
            return at::tanh(Chain(model)->first(t));
          });
          return recomputed(h, [model](const at::Tensor& t) { return at::tanh(Chain(model)->second(t)); });
        },
        [](comm::World& world, const at::Tensor& x) {
          const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
          return distribute_tensor(x.chunk(2)[static_cast<std::size_t>(mesh.coordinate()[0])],
                                   mesh.with_mesh(mesh.mesh()["tp"]), {Replicate{}},
                                   {.source_axis_rank = std::nullopt});
        });
}

// A parameter that is used through its local part is only seen by a scope.
TEST(RecomputedForward, LocalPartsInAScope) {
  check_recomputed(
      4, [] { return Dense(6, 6); },
      [](Dense& model, comm::World& world) {
        const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
        for (const at::Tensor& p : model->parameters())
          make_distributed(p, mesh.with_mesh(mesh.mesh()["tp"]), {Replicate{}});
        fully_shard(*model, mesh.with_mesh(mesh.mesh()["dp"]));
      },
      [](Dense& model, const at::Tensor& x) {
        return recomputed(x, [model](const at::Tensor& t) {
          const ForwardScope scope(*model);
          if (!is_dtensor(model->weight)) return Dense(model)(t);
          return at::linear(t, to_local(model->weight), to_local(model->bias));
        });
      },
      [](comm::World& world, const at::Tensor& x) {
        return x.chunk(2)[static_cast<std::size_t>(world.rank() / 2)];
      });
}

// A gradient that autograd or a user left on the parameter itself, laid out like the parameter before
// fully_shard.
TEST(RecomputedForward, GradientsLeftOnATensorParallelParameterAreReduced) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
    const comm::MeshGroups tp = mesh.with_mesh(mesh.mesh()["tp"]);
    Dense layer(6, 6);
    for (const at::Tensor& p : layer->parameters()) make_distributed(p, tp, {Shard{0}});
    fully_shard(*layer, mesh.with_mesh(mesh.mesh()["dp"]));
    const double mine = static_cast<double>(mesh.coordinate()[0]);
    layer->bias.mutable_grad() = distribute_tensor(at::full({6}, 1 + 2 * mine, at::kDouble), tp, {Shard{0}},
                                                   {.source_axis_rank = std::nullopt});
    layer->weight.pow(2).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(layer->bias.grad()), at::full({6}, 2.0, at::kDouble)));
    EXPECT_EQ(placements_of(layer->bias.grad()), placements_of(layer->bias));
  });
}

// A custom function that takes parameters as arguments: the graph holds them before any operator does.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, const at::Tensor& bias) {
    context->save_for_backward({x, weight});
    return at::linear(x, weight, bias);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0]), gradients[0].sum(0)};
  }
};

TEST(CustomFunctions, ParametersAsArguments) {
  check_recomputed(
      2, [] { return Chain(); },
      [](Chain& model, comm::World& world) {
        fully_shard(*model->first, line(world));
        fully_shard(*model, line(world));
      },
      [](Chain& model, const at::Tensor& x) {
        const at::Tensor h = at::tanh(OwnLinear::apply(x, model->first->weight, model->first->bias));
        return OwnLinear::apply(h, model->second->weight, model->second->bias);
      },
      chunk_of);
}

// ---- parts of a forward that the library recomputes ----

// Parameters are gathered again for the second run, in the dtype of the first.
TEST(RecomputedParts, HaveTheBitsOfPlainOnes) {
  ensure_cpu_bfloat16();
  for (const bool grouped : {false, true})
    for (const bool low : {false, true})
      comm::run_ranks(2, 60s, [&](comm::World& world) {
        Chain model;
        ShardOptions options;
        if (low) options.mixed_precision.param_dtype = at::kBFloat16;
        if (grouped)
          fully_shard(*model->first, line(world), options), fully_shard(*model->second, line(world), options);
        fully_shard(*model, line(world), options);
        const auto gradients = [&](bool again) {
          const auto first = [model](const std::vector<at::Tensor>& in) {
            const ForwardScope scope(*model->first);
            return at::tanh(Chain(model)->first(scope.input(in[0])));
          };
          const auto second = [model](const std::vector<at::Tensor>& in) {
            return at::tanh(Chain(model)->second(Chain(model)->first(in[0])));
          };
          const at::Tensor x = at::Tensor(chunk_of(world, numbers({8, 6}, 1))).set_requires_grad(true);
          const at::Tensor h = again ? recompute(first, {x}) : first({x});
          (again ? recompute(second, {h}) : second({h})).pow(2).mean().backward();
          std::vector<at::Tensor> all{x.grad()};
          ensure_sharded(model->parameters());
          for (const at::Tensor& parameter : model->parameters()) {
            all.push_back(to_local(parameter.grad()));
            parameter.mutable_grad() = at::Tensor();
          }
          return all;
        };
        const std::vector<at::Tensor> plain = gradients(false), again = gradients(true);
        for (std::size_t i = 0; i < plain.size(); ++i)
          EXPECT_TRUE(at::equal(again[i], plain[i])) << i << (low ? " bfloat16" : "");
      });
}

// ---- weights that are derived from parameters ----

struct AdaptedImpl : nn::Module {
  AdaptedImpl() {
    base = register_module("base", Dense(6, 5, 1));
    a = register_parameter("a", numbers({2, 6}, 3));
    b = register_parameter("b", numbers({5, 2}, 4));
    gain = register_parameter("gain", numbers({5, 1}, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor w = base->weight + b.matmul(a) * 0.5;                // low-rank adaptation
    return at::linear(x, w * (gain / w.norm(2, {1}, true)), base->bias);  // weight norm
  }
  Dense base{nullptr};
  at::Tensor a, b, gain;
};
TORCH_MODULE(Adapted);

// InferenceMode(false) would enable gradients.
struct NoGradients {
  explicit NoGradients(bool inference) {
    if (inference) mode.emplace();
  }
  at::NoGradGuard no_grad;
  std::optional<c10::InferenceMode> mode;
};

class Evaluation : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Inference, Evaluation, testing::Bool());

TEST_P(Evaluation, DerivedWeights) {
  const at::Tensor x = numbers({3, 6}, 9);
  Adapted alone;
  const at::Tensor expected = alone(x).detach();
  alone(x).sum().backward();
  comm::run_ranks(3, 60s, [&](comm::World& world) {
    for (const int groups : {1, 2}) {
      Adapted model;
      if (groups == 2) fully_shard(*model->base, line(world));
      const auto root = fully_shard(*model, line(world));
      const auto evaluate = [&] {
        const NoGradients guard(GetParam());
        EXPECT_TRUE(at::allclose(model(x), expected));
      };
      evaluate();  // before anything else
      evaluate();
      EXPECT_TRUE(at::allclose(model(x), expected));
      evaluate();  // some of it is gathered
      model(x).sum().backward();
      evaluate();
      for (const auto& item : model->named_parameters())
        EXPECT_TRUE(
            at::allclose(full_tensor(item.value().grad()), alone->named_parameters()[item.key()].grad()))
            << item.key();
    }
  });
}

TEST_P(Evaluation, DerivedWeightsOfTensorParallelParameters) {
  const at::Tensor x = numbers({3, 6}, 9);
  Adapted alone;
  const at::Tensor expected = alone(x).detach();
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh = grid(world, {2, 2}, {"dp", "tp"});
    const comm::MeshGroups tp = mesh.with_mesh(mesh.mesh()["tp"]);
    for (const bool one_mesh : {false, true}) {
      const comm::MeshGroups& own = one_mesh ? mesh : tp;
      Adapted model;
      for (const auto& item : model->named_parameters())
        distribute_parameter(
            item.value(), own,
            one_mesh
                ? Placements{Replicate{}, item.key() == "a" ? Placement(Replicate{}) : Placement(Shard{0})}
                : Placements{item.key() == "a" ? Placement(Shard{1}) : Placement(Shard{0})});
      fully_shard(*model, one_mesh ? mesh : mesh.with_mesh(mesh.mesh()["dp"]),
                  {.shard_axes = one_mesh ? std::vector<std::string>{"dp"} : std::vector<std::string>{}});
      const NoGradients guard(GetParam());
      const at::Tensor rows =
          distribute_tensor(x, own, Placements(own.shape().size()), {.source_axis_rank = std::nullopt});
      for (int i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(full_tensor(model(rows)), expected));
    }
  });
}

TEST(MixedPrecisionEvaluation, DerivedWeights) {
  const at::Tensor x = numbers({3, 6}, 9).to(at::kFloat);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Adapted model;
    model->to(at::kFloat);
    fully_shard(*model, line(world), {.mixed_precision = {.param_dtype = at::kBFloat16}});
    const at::Tensor expected = model(x);
    shard_state_of(*model)->reshard();
    const at::NoGradGuard no_grad;
    const at::Tensor y = model(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(y.to(at::kFloat), expected.to(at::kFloat), 0.05, 0.05));
    // An operator that takes only the derived weight casts like one that takes a parameter.
    shard_state_of(*model)->reshard();
    EXPECT_EQ(at::matmul(x, (model->b.matmul(model->a)).t()).scalar_type(), at::kBFloat16);
  });
}

// An operator that distributed tensors do not support works on the gathered parameter.
TEST_P(Evaluation, DerivedWeightsByAnyOperator) {
  const at::Tensor x = numbers({3, 6}, 9);
  const auto forward = [&](Dense& model) {
    return at::linear(x, at::renorm(model->weight * 2, 2, 0, 1.5) + at::renorm(model->weight, 2, 0, 0.5),
                      model->bias);
  };
  Dense alone(6, 5);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Dense model(6, 5);
    const auto state = fully_shard(*model, line(world));
    const NoGradients guard(GetParam());
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(forward(model), forward(alone)));
      state->reshard();
    }
  });
}

// An activation beside a derived weight needs the whole of it; what is written must arrive in the weight.
TEST_P(Evaluation, DerivedWeightsThatAreWritten) {
  const at::Tensor x = numbers({3, 6}, 9), mask = at::ones({5, 6}, at::kDouble).triu();
  const auto forward = [&](Dense& model) {
    at::Tensor w = model->weight - model->weight.mean(1, true);
    w.mul_(mask);
    w.add_(mask).clamp_(-0.5, 1.5);
    return at::linear(x, w, model->bias);
  };
  Dense alone(6, 5);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Dense model(6, 5);
    const auto state = fully_shard(*model, line(world));
    const NoGradients guard(GetParam());
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(forward(model), forward(alone)));
      state->reshard();
    }
    const at::Tensor w = model->weight * 2;
    EXPECT_TRUE(has_text(message_of<StateError>([&] { w.t().mul_(mask.t()); }), "out-of-place"));
    EXPECT_TRUE(at::allclose(full_tensor(w), alone->weight.detach() * 2)) << "unchanged";
  });
}

TEST_P(Evaluation, StatisticsAndTiesOutsideOfForward) {
  Adapted alone;
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Adapted model;
    const auto state = fully_shard(*model, line(world));
    {
      const NoGradients guard(GetParam());
      for (const auto& item : model->named_parameters()) {
        const at::Tensor other = alone->named_parameters()[item.key()];
        EXPECT_NEAR(item.value().pow(2).mean().item<double>(), other.pow(2).mean().item<double>(), 1e-12);
        EXPECT_NEAR(item.value().norm().item<double>(), other.norm().item<double>(), 1e-12);
        EXPECT_EQ(item.value().abs().max().item<double>(), other.abs().max().item<double>());
      }
      EXPECT_EQ(to_text(first_group(*state)->state()), "Sharded") << "shards suffice";
    }
    {
      const UnshardedScope scope(*model);
      const at::NoGradGuard no_grad;
      model->b.copy_(model->gain.expand({5, 2}) * 2);
    }
    EXPECT_TRUE(at::equal(full_tensor(model->b.detach()), (alone->gain.expand({5, 2}) * 2).detach()));
    // A penalty on parameters alone, with gradients.
    (model->a.pow(2).sum() + model->base->weight.abs().mean()).backward();
    EXPECT_TRUE(at::allclose(full_tensor(model->a.grad()), 2 * alone->a.detach()));
    EXPECT_TRUE(
        at::allclose(full_tensor(model->base->weight.grad()), alone->base->weight.detach().sign() / 30));
  });
}

// ---- buffers under mixed precision ----

struct Normalized : nn::Module {
  Normalized() {
    layer = register_module("layer", nn::Linear(5, 4));
    norm = register_module("norm", nn::BatchNorm1d(4));
    const at::NoGradGuard no_grad;
    layer->weight.copy_(numbers({4, 5}, 1));
    layer->bias.copy_(numbers({4}, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(layer(x)); }
  nn::Linear layer{nullptr};
  nn::BatchNorm1d norm{nullptr};
};

// The statistics are cast like inputs; a training step updates the buffers, not only the cast copies.
TEST(CastBuffers, RunningStatisticsAreUpdated) {
  const at::Tensor x = numbers({6, 5}, 3).to(at::kFloat);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kDouble}) {
      SCOPED_TRACE(c10::toString(dtype));
      Normalized alone, sharded;
      ensure_cpu_bfloat16();
      alone.to(dtype);
      fully_shard(sharded, line(world), {.mixed_precision = {.param_dtype = dtype}});
      for (int step = 0; step < 2; ++step) {
        const at::Tensor expected = alone.forward(x.to(dtype)), y = sharded.forward(x);
        EXPECT_TRUE(at::equal(y, expected));
        y.pow(2).sum().backward();
      }
      EXPECT_EQ(sharded.norm->running_mean.scalar_type(), at::kFloat);
      EXPECT_GT(sharded.norm->running_mean.abs().min().item<float>(), 0);
      EXPECT_TRUE(at::allclose(sharded.norm->running_mean, alone.norm->running_mean.to(at::kFloat)));
      EXPECT_TRUE(at::allclose(sharded.norm->running_var, alone.norm->running_var.to(at::kFloat)));
      // Evaluation reads them and changes nothing.
      const at::Tensor mean = sharded.norm->running_mean.clone();
      alone.eval();
      sharded.eval();
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::allclose(sharded.forward(x), alone.forward(x.to(dtype)), 1e-2, 1e-2));
      EXPECT_TRUE(at::equal(sharded.norm->running_mean, mean));
    }
  });
}

}  // namespace shard_corners_test
}  // namespace penstock
