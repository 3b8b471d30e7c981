// States and transitions, their cost in memory and bytes, and errors.
#include "penstock/shard/state/shard_state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <sstream>

#include "penstock/comm/record/recorder.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/fully_shard.h"
#include "penstock/random.h"
#include "penstock/shard/state/shard_info.h"
#include "tests/has_text.h"
#include "tests/shard/sharded_training.h"
#include "tests/throws.h"

namespace penstock {
namespace shard_state_test {

using namespace std::chrono_literals;
using namespace penstock::test;

comm::MeshGroups line(comm::World& world) {
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size())};
}

struct Two : nn::Module {
  Two() {
    weight = register_parameter("weight", at::arange(15, at::kFloat).view({5, 3}));
    bias = register_parameter("bias", at::arange(4, at::kFloat) * 10);
  }
  at::Tensor weight, bias;
};

TEST(ShardState, TransitionsByHand) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Two module;
    const at::Tensor weight = module.weight.detach().clone();
    const auto state = fully_shard(module, line(world));
    EXPECT_EQ(to_text(first_group(*state)->state()), "Sharded");
    EXPECT_TRUE(is_dtensor(module.weight));
    EXPECT_EQ(first_group(*state)->memory().gathered, 0);
    state->unshard(/*async=*/true);
    EXPECT_TRUE(first_group(*state)->unshard_pending());
    EXPECT_EQ(to_text(first_group(*state)->state()), "Sharded");
    state->wait_for_unshard();
    EXPECT_EQ(to_text(first_group(*state)->state()), "Unsharded");
    EXPECT_FALSE(is_dtensor(module.weight));
    EXPECT_TRUE(at::equal(module.weight.detach(), weight));
    const void* impl = module.weight.unsafeGetTensorImpl();
    const at::Tensor view = module.weight.detach().t();
    state->unshard();  // does nothing
    state->reshard();
    EXPECT_EQ(first_group(*state)->memory().gathered, 0);
    EXPECT_EQ(view.storage().nbytes(), 0u) << "memory goes, also where views look at it";
    EXPECT_EQ(module.weight.unsafeGetTensorImpl(), impl);
    state->reshard();
    state->unshard(true);
    state->reshard();  // a gather that was not used
    EXPECT_FALSE(first_group(*state)->unshard_pending());
    // Using the view gathers the memory again.
    EXPECT_TRUE(at::equal(view + 0, weight.t()));
    EXPECT_EQ(to_text(first_group(*state)->state()), "Unsharded");
    state->reshard();
  });
}

TEST(ShardState, OptimizersWorkOnShardsAndComputationOnWholes) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Two module;
    const auto state = fully_shard(module, line(world));
    {
      const at::NoGradGuard no_grad;
      module.weight.mul_(2);
      at::Tensor copy = module.weight.clone();
      EXPECT_TRUE(is_dtensor(copy));
      module.weight.add_(copy, 0.5);
      EXPECT_TRUE(is_dtensor(module.weight.detach()));
      EXPECT_EQ(to_text(first_group(*state)->state()), "Sharded") << "shards alone";
      EXPECT_TRUE(at::equal(at::mm(at::ones({1, 5}), module.weight),
                            at::arange(15, at::kFloat).view({5, 3}).sum(0, true) * 3));
      EXPECT_EQ(to_text(first_group(*state)->state()), "Unsharded") << "an activation beside it";
      EXPECT_TRUE(has_text(message_of<StateError>([&] { module.weight.mul_(2); }), "ensure_sharded"));
      EXPECT_TRUE(has_text(message_of<StateError>([&] { module.weight.t().zero_(); }), "gathered"));
      ensure_sharded({module.weight});
      module.weight.mul_(2);
    }
    // A handle of the shard may be computed with.
    const at::Tensor handle = module.weight.detach();
    EXPECT_TRUE(is_dtensor(handle));
    EXPECT_TRUE(at::equal(at::mm(at::ones({1, 5}), handle),
                          at::arange(15, at::kFloat).view({5, 3}).sum(0, true) * 6));
    state->reshard();
  });
}

TEST(ShardState, WritesInAScope) {
  comm::run_ranks(3, 60s, [](comm::World& world) {
    Two module;
    fully_shard(module, line(world));
    {
      const UnshardedScope scope(module);
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(is_dtensor(module.bias));
      module.bias.add_(1);
      module.weight[4][2] = 100;
    }
    EXPECT_TRUE(is_dtensor(module.bias));
    EXPECT_TRUE(at::equal(full_tensor(module.bias.detach()), at::arange(4, at::kFloat) * 10 + 1));
    EXPECT_EQ(full_tensor(module.weight.detach())[4][2].item<float>(), 100);
    EXPECT_TRUE(
        has_text(message_of<StateError>([&] { UnshardedScope(*std::make_shared<Two>()); }), "fully_shard"));
  });
}

// The gathered values are rounded; what is not written keeps the exact values of the shards.
TEST(ShardState, AScopeKeepsTheExactValuesOfWhatItDoesNotWrite) {
  comm::run_ranks(3, 60s, [](comm::World& world) {
    for (const bool encoded : {false, true}) {
      SCOPED_TRACE(encoded ? "int8_gather" : "param_dtype");
      Two module;
      at::Tensor weight = at::rand({5, 3}, at::detail::createCPUGenerator(3)) + 0.001;
      ShardOptions options;
      if (encoded) {
        options.extension = [](const std::string&, const at::Tensor&) { return int8_gather(8); };
      } else {
        weight[1][1] = std::numeric_limits<float>::quiet_NaN();
        options.mixed_precision.param_dtype = at::kBFloat16;
      }
      module.weight.detach().copy_(weight);
      fully_shard(module, line(world), options);
      const auto equals = [](const at::Tensor& a, const at::Tensor& b) {
        return at::equal(a.view(at::kInt), b.view(at::kInt));
      };
      const auto exact = [&] { return full_tensor(module.weight.detach()); };
      ASSERT_TRUE(equals(exact(), weight));
      {
        const UnshardedScope scope(module);
        EXPECT_FALSE(equals(module.weight.detach().to(at::kFloat), weight)) << "rounded";
      }
      EXPECT_TRUE(equals(exact(), weight)) << "nothing was written";
      {
        const UnshardedScope scope(module);
        const at::NoGradGuard no_grad;
        module.weight[4][2] = 100;
      }
      weight[4][2] = 100;
      EXPECT_TRUE(equals(exact(), weight)) << "one element was written";
    }
  });
}

TEST(ShardState, ScopesCanBeNested) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    for (const bool rounded : {false, true}) {
      struct Outer : nn::Module {};
      Outer outer;
      const auto inner = outer.register_module("inner", std::make_shared<Two>());
      const comm::MeshGroups mesh = line(world);
      ShardOptions options;
      if (rounded) options.mixed_precision.param_dtype = at::kBFloat16;
      const at::Tensor third = at::full({15}, 1.0f / 3);
      inner->weight.detach().copy_(third.view({5, 3}));
      ShardGroup& group = *first_group(*fully_shard(*inner, mesh, options));
      fully_shard(outer, mesh);
      {
        const UnshardedScope around(outer);
        const at::NoGradGuard no_grad;
        inner->weight[0][0] = 1;
        {
          const UnshardedScope within(*inner);
          inner->weight[1][1] = 2;
        }
        EXPECT_EQ(to_text(group.state()), "Unsharded") << "the scope around it continues";
        EXPECT_EQ(inner->weight[1][1].item<float>(), 2);
        inner->weight[4][2] = 3;
      }
      EXPECT_EQ(to_text(group.state()), "Sharded");
      const at::Tensor expected = third.clone();
      expected[0] = 1;
      expected[4] = 2;
      expected[14] = 3;
      EXPECT_TRUE(at::equal(full_tensor(inner->weight.detach()), expected.view({5, 3})));
    }
  });
}

TEST(ShardState, LoadedValues) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Two module;
    const comm::MeshGroups mesh = line(world);
    const auto state = fully_shard(module, mesh);
    const at::Tensor value = at::rand({5, 3}, at::detail::createCPUGenerator(3));
    load_whole(module.weight, value);
    EXPECT_TRUE(at::equal(full_tensor(module.weight.detach()), value));
    EXPECT_THROW(load_whole(module.weight, at::zeros({3, 5})), ValueError);
    EXPECT_THROW(load_whole(value, value), TypeError);
    // New data in place of the shard.
    const at::Tensor other =
        distribute_tensor(value * 2, mesh, {Shard{0}}, {.source_axis_rank = std::nullopt});
    module.weight.set_data(other);
    reset_sharded_parameters(module);
    reset_sharded_parameters(module);
    state->unshard();
    EXPECT_TRUE(at::equal(module.weight.detach(), value * 2));
    EXPECT_TRUE(has_text(message_of<StateError>([&] { reset_sharded_parameters(module); }), "reshard()"));
    state->reshard();
    module.weight.set_data(distribute_tensor(value, mesh, {Shard{1}}, {.source_axis_rank = std::nullopt}));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { reset_sharded_parameters(module); }), "[S(1)]"));
  });
}

// torch::load writes whole values into a module; the next use takes this rank's part of each, in every state
// of the group.
TEST(ShardState, ValuesOfTorchLoadAreTakenOver) {
  nn::Linear saved(6, 5);
  std::stringstream stream;
  torch::save(saved, stream);
  const std::string bytes = stream.str();
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    for (const bool gathered : {false, true}) {
      nn::Linear layer(6, 5);
      const auto state = fully_shard(*layer, line(world));
      if (gathered) state->unshard();
      std::istringstream in(bytes);
      torch::load(layer, in);
      const at::Tensor x = at::full({2, 6}, 0.5);
      const at::Tensor out = layer(x);
      EXPECT_TRUE(at::allclose(out, at::linear(x, saved->weight.detach(), saved->bias.detach()))) << gathered;
      out.sum().backward();
      EXPECT_TRUE(is_dtensor(layer->weight)) << "sharded again";
      EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), saved->weight.detach())) << gathered;
      EXPECT_TRUE(at::allclose(full_tensor(layer->weight.grad()), at::ones({5, 6})));
    }
  });
}

// A module whose parameter table is written by its own code.
struct Replaceable : nn::Module {
  explicit Replaceable(bool second = true) {
    weight = register_parameter("weight", at::arange(15, at::kFloat).view({5, 3}));
    if (second) bias = register_parameter("bias", at::arange(5, at::kFloat));
  }
  void replace(const at::Tensor& tensor) { weight = parameters_["weight"] = tensor; }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};

TEST(ShardState, ReplacedObjectsBecomeTheParameters) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh = line(world);
    for (const bool second : {true, false}) {
      const auto module = std::make_shared<Replaceable>(second);
      struct Outer : nn::Module {};
      Outer outer;
      outer.register_module("inner", module);
      const auto state = fully_shard(*module, mesh);
      fully_shard(outer, mesh);
      const at::Tensor old = module->weight;
      module->forward(at::ones({1, 3})).sum().backward();
      state->reshard();
      const at::Tensor value = at::rand({5, 3}, at::detail::createCPUGenerator(3));
      module->replace(value.clone().set_requires_grad(true));
      reset_sharded_parameters(outer);
      EXPECT_TRUE(is_dtensor(module->weight)) << "sharded where it stands";
      EXPECT_EQ(shard_of(module->weight)->group, first_group(*state));
      EXPECT_FALSE(shard_of(old).has_value());
      EXPECT_TRUE(at::equal(full_tensor(module->weight.detach()), value));
      // It is trained like the old one, with the new value.
      const at::Tensor x = at::full({2, 3}, 1.0 + world.rank());
      const at::Tensor out = module->forward(x);
      EXPECT_TRUE(at::allclose(out, at::linear(x, value, second ? at::arange(5, at::kFloat) : at::Tensor())));
      out.sum().backward();
      EXPECT_EQ(to_text(first_group(*state)->state()), "Sharded");
      ASSERT_TRUE(module->weight.grad().defined());
      EXPECT_TRUE(at::allclose(full_tensor(module->weight.grad()), at::full({5, 3}, 3.0)))
          << "the mean over both ranks";
      {
        const at::NoGradGuard no_grad;
        module->weight.mul_(2);
      }
      EXPECT_TRUE(at::allclose(module->forward(x),
                               at::linear(x, value * 2, second ? at::arange(5, at::kFloat) : at::Tensor())));
      // Shards are accepted as well; other shapes and layouts are rejected.
      EXPECT_TRUE(has_text(message_of<StateError>([&] {
                             const at::Tensor now = module->weight;
                             module->replace(value.clone());
                             try {
                               reset_sharded_parameters(outer);
                             } catch (...) {
                               module->replace(now);
                               throw;
                             }
                           }),
                           "reshard()"));
      state->reshard();
      module->replace(distribute_tensor(value, mesh, {Shard{0}}, {.source_axis_rank = std::nullopt}));
      reset_sharded_parameters(*module);
      EXPECT_TRUE(at::equal(full_tensor(module->weight.detach()), value));
      const at::Tensor now = module->weight;
      module->replace(distribute_tensor(value, mesh, {Shard{1}}, {.source_axis_rank = std::nullopt}));
      EXPECT_TRUE(has_text(message_of<ValueError>([&] { reset_sharded_parameters(*module); }), "[S(1)]"));
      module->replace(now);
      reset_sharded_parameters(*module);
      if (second) {
        module->replace(at::zeros({3, 5}));
        EXPECT_TRUE(has_text(message_of<ValueError>([&] { reset_sharded_parameters(*module); }), "[3, 5]"));
        module->replace(now);
      }
    }
  });
}

TEST(ShardState, AtMostTwoGroupsAreGatheredAndBuffersAreUsedAgain) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    torch::nn::Sequential model;
    for (int i = 0; i < 6; ++i) model->push_back(nn::Linear(64, 64));
    const comm::MeshGroups mesh = line(world);
    for (const auto& child : model->children()) fully_shard(*child, mesh);
    const auto root = fully_shard(*model, mesh);
    EXPECT_EQ(first_group(*root), nullptr);
    const std::int64_t group_bytes = (64 * 64 + 64) * 4;
    std::size_t allocations = 0;
    for (int step = 0; step < 5; ++step) {
      root->reset_peak();
      model->forward(at::ones({2, 64})).sum().backward();
      for (const auto& p : model->parameters()) p.mutable_grad().reset();
      EXPECT_LE(root->peak_gathered_bytes(), 2 * group_bytes + 4096) << "step " << step;
      if (step == 1) allocations = root->pool_allocations();
      if (step > 1) {
        EXPECT_EQ(root->pool_allocations(), allocations);
      }
    }
    for (ShardGroup* group : all_groups(*root)) EXPECT_EQ(to_text(group->state()), "Sharded");
  });
}

TEST(ShardState, BytesOfAStep) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Model model = same_model();
    const comm::MeshGroups mesh = line(world);
    shard_by_blocks(model, mesh);
    const auto step = [&] { model->forward(shared_tokens(0)).sum().backward(); };
    step();
    const auto meet = [&] { world.group().barrier().wait(); };
    meet();
    if (world.rank() == 0) comm::Recorder::global().reset_totals();
    meet();
    step();
    meet();
    const auto totals = comm::Recorder::global().totals();
    meet();
    // Blocks are gathered twice, the outermost group once; every group is reduced once.
    std::uint64_t gathers = 0, reductions = 0;
    for (ShardGroup* group : all_groups(*shard_state_of(*model))) {
      gathers += group == first_group(*shard_state_of(*model)) ? 1 : 2;
      reductions += 1;
    }
    EXPECT_EQ(totals.at("all_gather").operations, 2 * gathers) << "of both ranks";
    EXPECT_EQ(totals.at("reduce_scatter").operations, 2 * reductions);
    for (ShardGroup* group : all_groups(*shard_state_of(*model)))
      EXPECT_FALSE(group->unshard_pending()) << "nothing is gathered in vain";
  });
}

TEST(ShardState, ExplicitPrefetch) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world));
    ShardState &root = *shard_state_of(*model), &first = *shard_state_of(*model->blocks[0]),
               &second = *shard_state_of(*model->blocks[1]);
    root.set_automatic_prefetch(false);
    first.set_modules_to_forward_prefetch({&second});
    second.set_modules_to_backward_prefetch({&first});
    const at::Tensor h = model->blocks[0]->as<BlockImpl>()->forward(at::ones({1, 2, kWidth}, at::kDouble));
    EXPECT_TRUE(first_group(second)->unshard_pending());
    EXPECT_FALSE(first_group(root)->unshard_pending());
    model->blocks[1]->as<BlockImpl>()->forward(h).sum().backward();
    model->zero_grad();
    expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 2}), alone());
    EXPECT_THROW(first.set_modules_to_forward_prefetch({nullptr}), ValueError);
  });
}

struct Scoped : nn::Module {
  Scoped() { layer = register_module("layer", nn::Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) {
    const ForwardScope scope(*layer);
    return scope.output(layer(scope.input(x)));
  }
  nn::Linear layer{nullptr};
};

TEST(ShardState, AScopeFreesAtItsEndAndCasts) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Scoped model;
    EXPECT_EQ(model.forward(at::ones({1, 4})).scalar_type(), at::kFloat) << "nothing is sharded yet";
    fully_shard(*model.layer, line(world),
                {.reshard_after_forward = true,
                 .mixed_precision = {.param_dtype = at::kBFloat16, .output_dtype = at::kDouble}});
    const at::Tensor out = model.forward(at::ones({1, 4}));
    EXPECT_EQ(out.scalar_type(), at::kDouble);
    EXPECT_EQ(to_text(first_group(*shard_state_of(*model.layer))->state()), "Sharded");
    out.sum().backward();
    EXPECT_TRUE(model.layer->weight.grad().defined());
    EXPECT_EQ(model.layer->weight.grad().scalar_type(), at::kFloat);
  });
}

// Like a pipeline: backward without a reduction, then the reduction as a separate action.
TEST(ShardState, ReductionByHand) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world));
    ShardState& root = *shard_state_of(*model);
    const auto flags = [&](bool on) {
      root.set_is_last_backward(on);
      root.set_reshard_after_backward(on);
      root.set_requires_gradient_sync(on);
    };
    const auto reduce = [&](int) {
      EXPECT_EQ(to_text(first_group(root)->state()), "Unsharded");
      flags(true);
      root.post_backward();
      root.final_callback();
      EXPECT_EQ(to_text(first_group(root)->state()), "Sharded");
    };
    expect_same_parameters(train_share(model, {.rank = world.rank(),
                                               .ranks = 2,
                                               .microbatches = 3,
                                               .before_micro = [&](int, int) { flags(false); },
                                               .before_step = reduce}),
                           alone());
  });
}

// ---- modules that are built without memory ----

void fill_by_key(const std::string& name, const at::Tensor& shard, const GlobalBox& box) {
  keyed_uniform_(shard, {.seed = 11, .layer = layer_from_name(name), .purpose = purpose::kInit}, -1, 1, box);
}

TEST(DeferredShards, EqualThePartsOfOneProcess) {
  comm::run_ranks(3, 60s, [](comm::World& world) {
    DeferredInit deferred;
    std::shared_ptr<Scoped> model;
    {
      ModeGuard guard(deferred);
      model = std::make_shared<Scoped>();
    }
    fully_shard(*model, line(world));
    EXPECT_TRUE(has_text(message_of<StateError>([&] {
                           model->forward(at::ones({1, 4}));
                         }),
                         "materialize_shards"));
    materialize_shards(*model, fill_by_key);
    const at::Tensor whole = at::empty({4, 4});
    fill_by_key("layer.weight", whole, {});
    EXPECT_EQ(to_local(model->layer->weight.detach()).size(0), world.rank() < 2 ? 2 : 0);
    EXPECT_TRUE(at::equal(full_tensor(model->layer->weight.detach()), whole));
    model->forward(at::ones({1, 4})).sum().backward();
    EXPECT_TRUE(model->layer->weight.grad().defined());
  });
}

// ---- errors ----

TEST(ShardErrors, SayWhatToChange) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const auto grid = [&](std::vector<std::int64_t> shape, std::vector<std::string> names) {
      return comm::MeshGroups(world, init_device_mesh("cpu", shape, names, world.rank(), 4));
    };
    const comm::MeshGroups mesh = line(world);
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           fully_shard(*std::make_shared<Two>(), grid({1, 2, 2}, {"a", "b", "c"}));
                         }),
                         "shard_axes"));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           fully_shard(*std::make_shared<Two>(), mesh, {.shard_axes = {"dp", "dp"}});
                         }),
                         "every axis once"));
    EXPECT_TRUE(has_text(
        message_of<ValueError>([&] { fully_shard(*std::make_shared<Two>(), mesh, {.shard_axes = {"tp"}}); }),
        "tp"));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           fully_shard(*std::make_shared<Two>(), grid({2, 2}, {}), {.shard_axes = {"dp"}});
                         }),
                         "dp"))
        << "a mesh without names";
    const comm::MeshGroups gpus(world, init_device_mesh("cuda", {4}, {"dp"}, world.rank(), 4));
    DeferredInit deferred;
    std::shared_ptr<Two> later;
    {
      ModeGuard guard(deferred);
      later = std::make_shared<Two>();
    }
    fully_shard(*later, gpus);  // it has no device yet
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           materialize_shards(*later,
                                              [](const std::string&, const at::Tensor&, const GlobalBox&) {});
                         }),
                         "a CUDA device"));
    EXPECT_TRUE(has_text(
        message_of<ValueError>([&] {
          fully_shard(*std::make_shared<Two>(), mesh,
                      {.shard_placement = [](const std::string&, const at::Tensor&) { return Shard{1}; }});
        }),
        "'bias'"));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           fully_shard(*std::make_shared<Two>(), mesh,
                                       {.reshard_after_forward = ReshardTo{3}});
                         }),
                         "a divisor of the 4"));
    EXPECT_THROW(replicate(*std::make_shared<Two>(), mesh, {.shard_axes = {"dp"}}), ValueError);
    Model model = same_model();
    fully_shard(*model, mesh);
    EXPECT_TRUE(has_text(message_of<StateError>([&] { fully_shard(*model, mesh); }), "already sharded"));
    EXPECT_TRUE(has_text(message_of<StateError>([&] { fully_shard(*model->blocks[0], mesh); }),
                         "inner modules before outer ones"));
    EXPECT_THROW(shard_state_of(*model)->set_gradient_divide_factor(0), ValueError);
    struct Scalar : nn::Module {
      Scalar() { register_parameter("s", at::ones({})); }
    };
    EXPECT_TRUE(
        has_text(message_of<ValueError>([&] { fully_shard(*std::make_shared<Scalar>(), mesh); }), "0-dim"));
  });
}

// Whatever differs on rank 1, every rank gets an error that names it at the first use, not a wrong result or
// a hang.
TEST(FirstUse, DifferentParametersAreAnErrorOnAllRanks) {
  struct Named : nn::Module {
    Named(const std::string& name, at::IntArrayRef shape, at::ScalarType dtype) {
      weight = register_parameter(name, at::ones(shape, dtype));
    }
    at::Tensor weight;
  };
  const std::vector<std::string> differences{"shape",     "name",        "dtype",        "requires_grad",
                                             "placement", "param_dtype", "reduce_dtype", "nothing"};
  for (const std::string& difference : differences) {
    std::atomic<int> heard = 0;
    comm::run_ranks(3, 60s, [&](comm::World& world) {
      SCOPED_TRACE(difference);
      const auto differs = [&](const char* what) { return world.rank() == 1 && difference == what; };
      const auto make = [&](bool other) {
        return std::make_shared<Named>(
            other && differs("name") ? "w" : "weight",
            other && differs("shape") ? std::vector<std::int64_t>{6, 4} : std::vector<std::int64_t>{4, 4},
            !other             ? at::kFloat
            : differs("dtype") ? at::kHalf
                               : at::kBFloat16);
      };
      // The second of two groups differs; the first is used.
      struct Outer : nn::Module {};
      Outer outer;
      const auto first = make(false), second = make(true);
      outer.register_module("first", first);
      outer.register_module("second", second);
      if (differs("requires_grad")) second->weight.set_requires_grad(false);
      ShardOptions options;
      if (differs("placement"))
        options.shard_placement = [](const std::string&, const at::Tensor&) { return Shard{1}; };
      if (differs("param_dtype")) options.mixed_precision.param_dtype = at::kDouble;
      if (differs("reduce_dtype")) options.mixed_precision.reduce_dtype = at::kDouble;
      fully_shard(*first, line(world));
      fully_shard(*second, line(world), options);
      fully_shard(outer, line(world));
      const auto use = [&] { at::mm(at::ones({1, 4}), first->weight); };
      if (difference == "nothing") {
        use();
      } else {
        EXPECT_TRUE(has_text(message_of<ValueError>(use), "rank 1"));
      }
      ++heard;
    });
    EXPECT_EQ(heard, 3) << difference;
  }
}

// The default is decided at the first use, by the position of the module at that time.
TEST(FirstUse, OnlyTheOutermostModuleStaysGatheredAfterForward) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh = line(world);
    struct Outer : nn::Module {
      Outer() {
        first = register_module("first", nn::Linear(4, 4));
        second = register_module("second", nn::Linear(4, 4));
        third = register_module("third", nn::Linear(4, 4));
        own = register_parameter("own", at::ones({4}));
      }
      at::Tensor forward(const at::Tensor& x) { return third(second(first(x * own))) * own; }
      nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
      at::Tensor own;
    };
    const auto model = std::make_shared<Outer>();
    const auto first = fully_shard(*model->first, mesh), second = fully_shard(*model->second, mesh);
    const auto kept = fully_shard(*model->third, mesh, {.reshard_after_forward = false});
    const auto state_of = [](const std::shared_ptr<ShardState>& state) {
      return std::string(to_text(first_group(*state)->state()));
    };
    const auto forward = [](Outer& outer) {
      const ForwardScope scope(outer);
      const at::Tensor x = at::ones({1, 4});
      return outer.forward(x);
    };
    // On its own the first layer is the outermost module, and so stays gathered when its forward has ended.
    {
      const ForwardScope scope(*model->first);
      model->first(at::ones({1, 4}));
    }
    EXPECT_EQ(state_of(first), "Unsharded");
    EXPECT_FALSE(first_group(*first)->reshards_after_forward());
    first->reshard();
    const auto root = fully_shard(*model, mesh);
    forward(*model);
    EXPECT_TRUE(first_group(*first)->reshards_after_forward()) << "it is inside another now";
    EXPECT_EQ(state_of(first), "Sharded");
    EXPECT_EQ(state_of(second), "Sharded");
    EXPECT_EQ(state_of(kept), "Unsharded") << "chosen";
    EXPECT_EQ(state_of(root), "Unsharded");
    const auto freed = std::make_shared<Outer>();
    fully_shard(*freed->first, mesh);
    const auto chosen = fully_shard(*freed, mesh, {.reshard_after_forward = true});
    forward(*freed);
    EXPECT_EQ(state_of(chosen), "Sharded") << "chosen";
  });
}

// Name from the outermost module, dtype, whole size, placements.
TEST(FirstUse, ParametersPrintTheirPathAndWholeSize) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh = line(world);
    Two two;
    fully_shard(two, mesh, {.shard_placement = [](const std::string& name, const at::Tensor&) {
                  return Shard{name == "weight" ? 1 : 0};
                }});
    EXPECT_EQ(shard_of(two.weight)->parameter().to_string(), "'weight' float32[5, 3] as [S(1)]");
    EXPECT_EQ(shard_of(two.bias)->parameter().to_string(), "'bias' float32[4] as [S(0)]");
    Model model = same_model();
    const at::Tensor inner = model->blocks[1]->as<BlockImpl>()->up->weight;
    fully_shard(*model->blocks[1], mesh);
    EXPECT_EQ(shard_of(inner)->parameter().to_string(), "'up.weight' float64[64, 16] as [S(0)]");
    fully_shard(*model, mesh, {.mixed_precision = {.param_dtype = at::kFloat}});
    EXPECT_EQ(shard_of(inner)->parameter().to_string(), "'blocks.1.up.weight' float64[64, 16] as [S(0)]");
    EXPECT_EQ(shard_of(model->head->weight)->parameter().to_string(),
              "'head.weight' float64[30, 16] as [S(0)]")
        << "of the shard, not of what is gathered";
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { load_whole(inner, at::zeros({3})); }),
                         "'blocks.1.up.weight' float64[64, 16]"));
  });
}

// A state is destroyed with the parameters of its module; a new module at the same address gets a new state.
TEST(ShardState, IsDestroyedWithItsModule) {
  comm::run_ranks(1, 60s, [](comm::World& world) {
    std::weak_ptr<ShardState> seen;
    {
      auto module = std::make_shared<Scoped>();
      seen = fully_shard(*module->layer, line(world));
      fully_shard(*module, line(world));
      module->forward(at::ones({1, 4})).sum().backward();
      EXPECT_FALSE(seen.expired());
    }
    EXPECT_TRUE(seen.expired());
  });
}

}  // namespace shard_state_test
}  // namespace penstock
