// Properties of fully_shard other than its results: when groups are gathered and freed, in which order they
// are reduced, whose memory is written.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/shard/state/shard_state.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace shard_contract_test {

using namespace std::chrono_literals;
namespace nn = torch::nn;
using test::has_text;
using test::message_of;

comm::MeshGroups line(comm::World& world) {
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size())};
}

struct OneImpl : nn::Module {
  explicit OneImpl(std::int64_t rows = 4) { weight = register_parameter("weight", at::ones({rows, 3})); }
  at::Tensor weight;
};
TORCH_MODULE(One);

TEST(ShardContract, ParametersThatAreBeingWrittenAreNotResharded) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    One module;
    const auto state = fully_shard(*module, line(world));
    {
      const UnshardedScope scope(*module);
      EXPECT_TRUE(
          has_text(message_of<StateError>([&] { state->reshard(); }), "end the UnshardedScope first"));
      EXPECT_EQ(to_text(first_group(*state)->state()), "Unsharded");
    }
    EXPECT_EQ(to_text(first_group(*state)->state()), "Sharded");
  });
}

TEST(ShardContract, GatheredParametersAreNotWritten) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    One module;
    fully_shard(*module, line(world));
    const at::NoGradGuard no_grad;
    // A plain tensor besides the parameter: the operator uses the whole parameter.
    const at::Tensor whole = at::ones({4, 3});
    EXPECT_TRUE(has_text(message_of<StateError>([&] { module->weight.add_(whole); }),
                         "call ensure_sharded(parameters)"));
  });
}

// The gradient of a sum is an expanded number: adding a second one in place would write one address many
// times.
TEST(ShardContract, TheFirstGradientOfAnAccumulationIsNotWritten) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    One module;
    const auto state = fully_shard(*module, line(world));
    for (int micro = 0; micro < 3; ++micro) {
      state->set_requires_gradient_sync(micro == 2);
      module->weight.sum().backward();
    }
    EXPECT_TRUE(at::equal(full_tensor(module->weight.grad()), at::full({4, 3}, 3.0)));
  });
}

// 256 + 1 is 256 in bfloat16.
TEST(ShardContract, AccumulationIsInTheReduceDtype) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    One module;
    const auto state =
        fully_shard(*module, line(world),
                    {.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    for (int micro = 0; micro < 4; ++micro) {
      state->set_requires_gradient_sync(micro == 3);
      (module->weight * (micro == 0 ? 256.0 : 1.0)).sum().backward();
    }
    EXPECT_TRUE(at::equal(full_tensor(module->weight.grad()), at::full({4, 3}, 259.0)));
  });
}

TEST(ShardContract, AGradientPutOnAGatheredParameterIsReducedToo) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    One module;
    const auto state = fully_shard(*module, line(world));
    state->set_reshard_after_backward(false);
    state->unshard();
    module->weight.mutable_grad() = at::full({4, 3}, world.rank() == 0 ? 1.0 : 3.0);
    state->set_reshard_after_backward(true);
    state->post_backward();
    state->final_callback();
    ASSERT_TRUE(module->weight.grad().defined());
    EXPECT_TRUE(at::equal(full_tensor(module->weight.grad()), at::full({4, 3}, 2.0)));
  });
}

// The state of each group while a block computes.
struct Watched : nn::Module {
  Watched() {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(4, 4)));
    head = register_parameter("head", at::ones({4}));
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = layers[i](x);
      if (look) look(static_cast<int>(i), x);
    }
    return x * head;
  }
  std::vector<nn::Linear> layers;
  at::Tensor head;
  std::function<void(int, const at::Tensor&)> look;  // after each layer, with its output
};

TEST(ShardContract, TheOutermostGroupStaysGatheredAfterForward) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Watched model;
    const comm::MeshGroups mesh = line(world);
    for (nn::Linear& layer : model.layers) fully_shard(*layer, mesh);
    const auto root = fully_shard(model, mesh);
    const at::Tensor out = model.forward(at::ones({2, 4}));
    EXPECT_EQ(to_text(first_group(*root)->state()), "Unsharded");
    EXPECT_EQ(to_text(first_group(*shard_state_of(*model.layers[0]))->state()), "Sharded");
    out.sum().backward();
    EXPECT_EQ(to_text(first_group(*root)->state()), "Sharded");
  });
}

TEST(ShardContract, TheNextGroupIsGatheredAhead) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Watched model;
    const comm::MeshGroups mesh = line(world);
    std::vector<ShardGroup*> groups;
    for (nn::Linear& layer : model.layers) groups.push_back(first_group(*fully_shard(*layer, mesh)));
    fully_shard(model, mesh);
    model.forward(at::ones({2, 4})).sum().backward();  // the order is known after the first step
    std::vector<bool> forward_ahead, backward_ahead;
    model.look = [&](int layer, const at::Tensor& output) {
      if (layer < 2) forward_ahead.push_back(groups[static_cast<std::size_t>(layer) + 1]->unshard_pending());
      // The gradient of this output comes from the next layer; the layer itself has not been used in backward
      // yet.
      if (layer < 2)
        output.register_hook([&, layer](const at::Tensor& gradient) {
          backward_ahead.push_back(groups[static_cast<std::size_t>(layer)]->unshard_pending());
          return gradient;
        });
    };
    const at::Tensor out = model.forward(at::ones({2, 4}));
    EXPECT_EQ(forward_ahead, (std::vector<bool>{true, true}));
    out.sum().backward();
    EXPECT_EQ(backward_ahead, (std::vector<bool>{true, true}));
  });
}

// Gradients arrive in a different order on each rank; the groups are reduced in one order.
TEST(ShardContract, ReductionsKeepTheOrderOfForwardOnEveryRank) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    One a(4), b(8);
    nn::Module both;
    both.register_module("a", a.ptr());
    both.register_module("b", b.ptr());
    const comm::MeshGroups mesh = line(world);
    fully_shard(*a, mesh);
    fully_shard(*b, mesh);
    fully_shard(both, mesh);
    // Both ranks use a, b and a again. Groups after b get their gradient first, groups before it last.
    const at::Tensor early = a->weight * 2, middle = b->weight * 3, late = a->weight * 2;
    const at::Tensor& of_a = world.rank() == 0 ? early : late;
    (of_a.sum() + middle.sum()).backward();
    EXPECT_TRUE(at::equal(full_tensor(a->weight.grad()), at::full({4, 3}, 2.0)));
    EXPECT_TRUE(at::equal(full_tensor(b->weight.grad()), at::full({8, 3}, 3.0)));
  });
}

}  // namespace shard_contract_test
}  // namespace penstock
