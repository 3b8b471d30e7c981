// The parameters and groups in use may change from step to step: what only an earlier step used is neither
// waited for nor gathered.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "penstock/comm/record/recorder.h"
#include "penstock/dtensor.h"
#include "penstock/fully_shard.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/shard/state/shard_state.h"

namespace penstock {
namespace shard_use_test {

using namespace std::chrono_literals;
namespace nn = torch::nn;

comm::MeshGroups line(comm::World& world) {
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size())};
}

struct TwoBranches : nn::Module {
  TwoBranches() {
    always = register_module("always", nn::Linear(4, 4));
    sometimes = register_module("sometimes", nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x, bool both) { return both ? always(x) + sometimes(x) : always(x); }
  nn::Linear always{nullptr}, sometimes{nullptr};
};

struct BottomAndTop : nn::Module {
  BottomAndTop() {
    bottom = register_module("bottom", nn::Linear(4, 4));
    top = register_module("top", std::make_shared<TwoBranches>());
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.fill_(0.25);
  }
  nn::Linear bottom{nullptr};
  std::shared_ptr<TwoBranches> top;
};

void clear_gradients(nn::Module& module) {
  for (const at::Tensor& p : module.parameters()) p.mutable_grad().reset();
}

// When backward reaches the bottom, the group above it has been freed and its gradients are being reduced,
// also in steps that do not use one of its parameters that an earlier step used.
TEST(UseOverSteps, AGroupDoesNotWaitForAParameterOfAnEarlierStep) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    BottomAndTop model;
    const comm::MeshGroups mesh = line(world);
    fully_shard(*model.bottom, mesh);
    ShardGroup& group = *first_group(*fully_shard(*model.top, mesh));
    fully_shard(model, mesh);
    for (const bool both : {true, false, true, false}) {
      clear_gradients(model);
      int seen = 0;
      {
        const at::Tensor h = model.bottom(at::ones({2, 4}));
        h.register_hook([&](const at::Tensor&) {
          ++seen;
          EXPECT_EQ(to_text(group.state()), "Sharded") << (both ? "both" : "one");
          EXPECT_EQ(group.memory().gradients, 0) << (both ? "both" : "one");
        });
        model.top->forward(h, both).sum().backward();
      }
      EXPECT_EQ(seen, 1);
      EXPECT_EQ(model.top->sometimes->weight.grad().defined(), both) << "no rank has used it";
      // Inputs of the top are 1.25; two rows; the mean over the ranks is the same.
      EXPECT_TRUE(at::allclose(full_tensor(model.top->always->weight.grad()), at::full({4, 4}, 2.5)));
      if (both) {
        EXPECT_TRUE(at::allclose(full_tensor(model.top->sometimes->weight.grad()), at::full({4, 4}, 2.5)));
      }
    }
  });
}

// A graph that is still alive may be run later, so its parameters are waited for: the gradients of two live
// graphs are correct.
TEST(UseOverSteps, GraphsThatOverlapAreRunOneAfterTheOther) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    BottomAndTop model;
    const comm::MeshGroups mesh = line(world);
    fully_shard(*model.bottom, mesh);
    fully_shard(*model.top, mesh);
    fully_shard(model, mesh);
    for (int step = 0; step < 2; ++step) {
      clear_gradients(model);
      const at::Tensor first = model.top->forward(model.bottom(at::ones({2, 4})), true).sum();
      const at::Tensor second = model.top->forward(model.bottom(at::full({2, 4}, 2.0)), false).sum();
      first.backward();
      second.backward();
      // Inputs of the top: 1.25 and 2.25.
      EXPECT_TRUE(
          at::allclose(full_tensor(model.top->always->weight.grad()), at::full({4, 4}, 2 * (1.25 + 2.25))));
      EXPECT_TRUE(at::allclose(full_tensor(model.top->sometimes->weight.grad()), at::full({4, 4}, 2.5)));
    }
  });
}

// A gradient that was kept whole is reduced by the next backward that reduces, even if that did not use its
// parameter.
TEST(UseOverSteps, KeptGradientsAreReducedByAStepThatDoesNotUseThem) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    BottomAndTop model;
    const comm::MeshGroups mesh = line(world);
    fully_shard(*model.top->sometimes, mesh);
    const auto root = fully_shard(model, mesh);
    for (int step = 0; step < 2; ++step) {
      clear_gradients(model);
      root->set_requires_gradient_sync(false);
      model.top->forward(model.bottom(at::full({2, 4}, 1.0 + world.rank())), true).sum().backward();
      EXPECT_FALSE(model.top->sometimes->weight.grad().defined());
      root->set_requires_gradient_sync(true);
      model.top->forward(model.bottom(at::ones({2, 4})), false).sum().backward();
      // Inputs of the top: 1.25 and 2.25 on the two ranks, and 1.25 again for the parameters that are always
      // used.
      ASSERT_TRUE(model.top->sometimes->weight.grad().defined());
      EXPECT_TRUE(at::allclose(full_tensor(model.top->sometimes->weight.grad()), at::full({4, 4}, 2 * 1.75)));
      EXPECT_TRUE(
          at::allclose(full_tensor(model.top->always->weight.grad()), at::full({4, 4}, 2 * 1.75 + 2 * 1.25)));
    }
  });
}

// The caller may write the gradient it passed to backward, also if it arrives at a parameter unchanged.
TEST(UseOverSteps, AKeptGradientIsNotTheMemoryOfTheCaller) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    struct Shifted : nn::Module {
      Shifted() { shift = register_parameter("shift", at::zeros({4, 4})); }
      at::Tensor shift;
    };
    for (const bool owned : {false, true}) {
      Shifted model;
      const auto root = fully_shard(model, line(world));
      root->set_requires_gradient_sync(false);
      at::Tensor gradient = at::full({4, 4}, 2.0);
      const auto backward = [&] {
        const at::Tensor y = at::ones({4, 4}) + model.shift;
        y.backward(owned ? gradient.clone() : gradient);
      };
      backward();
      gradient.zero_();
      gradient.add_(3);
      root->set_requires_gradient_sync(true);
      backward();
      EXPECT_TRUE(at::equal(full_tensor(model.shift.grad()), at::full({4, 4}, 5.0))) << owned;
    }
  });
}

// Three groups; the middle one is used only by the first step.
TEST(UseOverSteps, AGroupOfAnEarlierStepIsNotGathered) {
  std::vector<std::uint64_t> gathers;
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    nn::Sequential model;
    for (int i = 0; i < 3; ++i) model->push_back(nn::Linear(4, 4));
    const comm::MeshGroups mesh = line(world);
    for (const auto& child : model->children()) fully_shard(*child, mesh);
    fully_shard(*model, mesh);
    const auto layer = [&](std::size_t i, const at::Tensor& x) {
      return model->at<nn::LinearImpl>(i).forward(x);
    };
    const auto meet = [&] { world.group().barrier().wait(); };
    for (int step = 0; step < 5; ++step) {
      meet();
      if (world.rank() == 0) comm::Recorder::global().reset_totals();
      meet();
      at::Tensor h = layer(0, at::ones({1, 4}));
      if (step == 0) h = layer(1, h);
      const at::Tensor loss = layer(2, h).sum();
      if (step == 4) {
        const at::NoGradGuard no_grad;
        layer(0, layer(1, at::ones({1, 4})));
      }
      loss.backward();
      meet();
      if (world.rank() == 0)
        gathers.push_back(comm::Recorder::global().totals().at("all_gather").operations / 2);
      EXPECT_EQ(first_group(*shard_state_of(*model->children()[1]))->unshard_pending(), false);
      meet();
    }
  });
  // The last group stays gathered between forward and backward; every other is gathered twice. The first step
  // also compares the parameters. The second still prefetches the middle one in forward, because it followed
  // last time. In the last step it is evaluated without gradients, which frees the last one and then itself,
  // and gathers the first, and prefetches the last: backward has both, and does not gather the middle one.
  EXPECT_EQ(gathers, (std::vector<std::uint64_t>{6, 4, 3, 3, 5}));
}

// An evaluation that ends early leaves a prefetch in progress. Whoever then writes the shards, the next use
// sees the new values.
TEST(UseOverSteps, AGatherAheadDoesNotOutliveAWriteOfItsShards) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    nn::Sequential model;
    for (int i = 0; i < 3; ++i) model->push_back(nn::Linear(nn::LinearOptions(4, 4).bias(false)));
    const comm::MeshGroups mesh = line(world);
    for (const auto& child : model->children()) fully_shard(*child, mesh);
    fully_shard(*model, mesh);
    const auto layer = [&](std::size_t i) -> nn::LinearImpl& { return model->at<nn::LinearImpl>(i); };
    const at::Tensor weight = layer(1).weight, x = at::ones({1, 4});
    const at::NoGradGuard no_grad;
    model->forward(x);
    const std::vector<std::function<void()>> writes{
        [&] { weight.fill_(2); },
        [&] {
          load_whole(weight, at::full({4, 4}, 3.0));
        },
        [&] {
          ensure_sharded(weight);
          to_local(weight.detach()).fill_(4);
        },
        [&] {
          weight.set_data(distribute_tensor(at::full({4, 4}, 5.0, at::kFloat), mesh, {Shard{0}},
                                            {.source_axis_rank = std::nullopt}));
          reset_sharded_parameters(*model->children()[1]);
        },
    };
    for (std::size_t i = 0; i < writes.size(); ++i) {
      ensure_sharded(model->parameters());
      layer(0).forward(x);
      ASSERT_TRUE(shard_of(weight)->group->unshard_pending()) << "asked for ahead";
      writes[i]();
      EXPECT_TRUE(at::equal(layer(1).forward(x), at::full({1, 4}, 4.0 * static_cast<double>(i + 2))))
          << "write " << i;
    }
    ensure_sharded(model->parameters());  // ends the prefetch of the last use
  });
}

// The slice that is kept after forward holds the values from before a write, and so does a gather of slices.
TEST(UseOverSteps, ASliceDoesNotOutliveAWriteOfItsShards) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    nn::Linear layer(nn::LinearOptions(4, 4).bias(false));
    const auto state = fully_shard(*layer, line(world), {.reshard_after_forward = ReshardTo{2}});
    const auto forward = [&] {
      const ForwardScope scope(*layer);
      return layer(at::ones({1, 4}));
    };
    const at::NoGradGuard no_grad;
    for (const bool ahead : {false, true})
      for (const double value : {2.0, 3.0}) {
        forward();
        ASSERT_EQ(to_text(first_group(*state)->state()), "ShardedPostForward");
        if (ahead) state->unshard(/*async=*/true);
        layer->weight.fill_(value);
        EXPECT_TRUE(at::equal(forward(), at::full({1, 4}, 4 * value))) << value << (ahead ? " ahead" : "");
      }
    ensure_sharded(layer->weight);
  });
}

TEST(UseOverSteps, TheOptionMayChangeBetweenForwardAndBackward) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    for (const bool value : {false, true})
      for (const bool ahead : {false, true}) {
        nn::Linear layer(nn::LinearOptions(4, 4).bias(false));
        const auto state = fully_shard(*layer, line(world), {.reshard_after_forward = ReshardTo{2}});
        const at::Tensor x = at::ones({1, 4}).set_requires_grad(true);
        at::Tensor y;
        {
          const ForwardScope scope(*layer);
          y = layer(x);
        }
        ASSERT_EQ(to_text(first_group(*state)->state()), "ShardedPostForward");
        if (ahead) state->unshard(/*async=*/true);
        state->set_reshard_after_forward(value);
        y.sum().backward();
        EXPECT_TRUE(at::allclose(full_tensor(layer->weight.grad()), at::ones({4, 4})));
        EXPECT_TRUE(at::allclose(x.grad(), full_tensor(layer->weight.detach()).sum(0, true)));
      }
  });
}

}  // namespace shard_use_test
}  // namespace penstock
