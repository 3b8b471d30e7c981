// Loss scaling: growth and backoff, agreement of ranks, state.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/gradients.h"
#include "penstock/optimizer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::optim {
namespace loss_scaler_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;

NamedParameter with_gradient(std::string name, const at::Tensor& gradient) {
  at::Tensor p = at::zeros_like(gradient).set_requires_grad(true);
  p.mutable_grad() = gradient.clone();
  return {std::move(name), p};
}

TEST(LossScaler, ScalesAndUnscales) {
  LossScaler scaler({.initial_scale = 1024});
  at::Tensor w = at::full({3}, 2.0).set_requires_grad(true);
  const at::Tensor loss = scaler.scaled((w * w).sum());
  EXPECT_EQ(loss.item<float>(), 12 * 1024);
  loss.backward();
  EXPECT_TRUE(at::equal(w.grad(), at::full({3}, 4096.0)));
  EXPECT_TRUE(scaler.unscale({{"w", w},
                              {"tied", w},
                              {"without", at::ones({2}).set_requires_grad(true)},
                              with_gradient("empty", at::zeros({0}))}));
  EXPECT_TRUE(at::equal(w.grad(), at::full({3}, 4.0)));
}

TEST(LossScaler, GrowsAndShrinksWithinItsBounds) {
  LossScaler scaler({.initial_scale = 8, .growth_interval = 3, .min_scale = 2, .max_scale = 32});
  const auto step = [&](double value) {
    const bool good = scaler.unscale({with_gradient("p", at::full({2}, value))});
    EXPECT_EQ(good, std::isfinite(value));
    scaler.update();
    return scaler.scale();
  };
  std::vector<double> scales;
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  for (const double value : {1.0, 1.0, 1.0, 1.0, 1.0, infinity, 1.0, 1.0, nan, -infinity, nan, 1.0, 1.0, 1.0})
    scales.push_back(step(value));
  EXPECT_EQ(scales, (std::vector<double>{8, 8, 16, 16, 16, 8, 8, 8, 4, 2, 2, 2, 2, 4}));
  for (int i = 0; i < 20; ++i) step(1);
  EXPECT_EQ(scaler.scale(), 32);
}

TEST(LossScaler, DisabledTouchesNothing) {
  LossScaler scaler({.enabled = false});
  const at::Tensor loss = at::ones({});
  EXPECT_TRUE(scaler.scaled(loss).is_same(loss));
  EXPECT_EQ(scaler.scale(), 1);
  const NamedParameter p = with_gradient("p", at::full({2}, std::nan("")));
  EXPECT_TRUE(scaler.unscale({p}));
  EXPECT_TRUE(scaler.unscale({p}));
  scaler.update();
  scaler.load_state({.scale = 4, .good_steps = 1});
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_TRUE(p.tensor.grad().isnan().all().item<bool>());
}

TEST(LossScaler, StateContinues) {
  LossScaler first({.initial_scale = 8, .growth_interval = 4});
  const auto step = [](LossScaler& scaler, double value) {
    scaler.unscale({with_gradient("p", at::full({2}, value))});
    scaler.update();
  };
  for (const double value : {1.0, std::nan(""), 1.0, 1.0, 1.0}) step(first, value);
  EXPECT_EQ(first.state(), (LossScalerState{.scale = 4, .good_steps = 3}));
  LossScaler second({.initial_scale = 1024, .growth_interval = 4});
  second.load_state(first.state());
  step(first, 1);
  step(second, 1);
  EXPECT_EQ(first.state(), (LossScalerState{.scale = 8, .good_steps = 0}));
  EXPECT_EQ(second.state(), first.state());
}

// An infinity on one rank only: both skip the step and reduce the scale, then continue together.
TEST(LossScaler, RanksAgree) {
  for (const int where : {0, 1})
    comm::run_ranks(2, 60s, [&](comm::World& world) {
      LossScaler scaler({.initial_scale = 4, .growth_interval = 2});
      const NamedParameter p = with_gradient("p" + std::to_string(world.rank()), at::ones({3}));
      AdamW adamw({p});
      std::vector<bool> good;
      for (int step = 0; step < 5; ++step) {
        at::Tensor gradient = at::full({3}, scaler.scale());
        if (step == 1 && world.rank() == where) gradient[1] = std::numeric_limits<float>::infinity();
        at::Tensor(p.tensor).mutable_grad() = gradient;
        good.push_back(scaler.unscale({p}, {.groups = {world.group()}}));
        if (good.back()) {
          EXPECT_TRUE(at::equal(p.tensor.grad(), at::ones({3})));
          adamw.step();
        }
        scaler.update();
      }
      EXPECT_EQ(good, (std::vector<bool>{true, false, true, true, true}));
      EXPECT_EQ(scaler.state(), (LossScalerState{.scale = 4, .good_steps = 1}));
      EXPECT_EQ(adamw.state().steps[0].steps, 4);
    });
}

// The shards of a parameter need no group: their mesh is known.
TEST(LossScaler, RanksOfAMeshAgree) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
    at::Tensor split = distribute_tensor(at::zeros({4}), mesh, {Shard{0}}).set_requires_grad(true),
               terms = distribute_tensor(at::zeros({2}), mesh, {Replicate{}}).set_requires_grad(true);
    for (const bool bad : {false, true}) {
      LossScaler scaler({.initial_scale = 2});
      at::Tensor local = at::full({2}, 2.0);
      if (bad && world.rank() == 1) local[0] = std::nan("");
      split.mutable_grad() = from_local(local, mesh, {Shard{0}});
      terms.mutable_grad() = from_local(at::full({2}, 1.0 + world.rank()), mesh, {Partial{}});
      EXPECT_EQ(scaler.unscale({{"split", split}, {"terms", terms}}), !bad);
      EXPECT_TRUE(at::equal(full_tensor(terms.grad()), at::full({2}, 1.5)));
      if (!bad) {
        EXPECT_TRUE(at::equal(full_tensor(split.grad()), at::ones({4})));
      }
    }
  });
}

TEST(LossScaler, Mistakes) {
  const auto refused = [](LossScalerOptions options) {
    return message_of<ValueError>([&] { const LossScaler scaler(options); });
  };
  const double nan = std::nan("");
  EXPECT_TRUE(has_text(refused({.initial_scale = 0}), "initial_scale"));
  EXPECT_TRUE(has_text(refused({.initial_scale = nan}), "initial_scale"));
  EXPECT_TRUE(has_text(refused({.growth_factor = 1}), "growth_factor"));
  EXPECT_TRUE(has_text(refused({.backoff_factor = 1}), "backoff_factor"));
  EXPECT_TRUE(has_text(refused({.backoff_factor = nan}), "backoff_factor"));
  EXPECT_TRUE(has_text(refused({.growth_interval = 0}), "growth_interval"));
  EXPECT_TRUE(has_text(refused({.min_scale = 0}), "min_scale"));
  EXPECT_TRUE(has_text(refused({.max_scale = 0.5}), "max_scale"));
  LossScaler scaler;
  EXPECT_THROW(scaler.update(), StateError);
  scaler.unscale({});
  EXPECT_TRUE(has_text(message_of<StateError>([&] { scaler.unscale({}); }), "update()"));
  scaler.update();
  for (const double scale : {0.0, -1.0, nan}) EXPECT_THROW(scaler.load_state({.scale = scale}), ValueError);
  EXPECT_THROW(scaler.load_state({.scale = 1, .good_steps = -1}), ValueError);
}

}  // namespace loss_scaler_test
}  // namespace penstock::optim
