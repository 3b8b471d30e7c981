// Training on shards equals training in one process.
#include "penstock/fully_shard.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/shard/state/shard_state.h"
#include "tests/has_text.h"
#include "tests/shard/sharded_training.h"
#include "tests/throws.h"

namespace penstock {
namespace fully_shard_test {

using namespace std::chrono_literals;
using namespace penstock::test;

comm::MeshGroups line(comm::World& world) {
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size())};
}

class Worlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, Worlds, testing::Values(1, 2, 3, 4));

TEST_P(Worlds, TrainLikeOneProcess) {
  alone();
  comm::run_ranks(GetParam(), 60s, [](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world));
    const Training ours = train_share(model, {.rank = world.rank(), .ranks = world.size()});
    expect_same_parameters(ours, alone());
  });
}

comm::MeshGroups grid(comm::World& world, std::vector<std::int64_t> shape, std::vector<std::string> names) {
  return {world, init_device_mesh("cpu", shape, names, world.rank(), world.size())};
}

TEST(FullyShard, OneGroupForEverything) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Model model = same_model();
    const auto state = fully_shard(*model, line(world));
    EXPECT_EQ(all_groups(*state).size(), 1u);
    expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 2}), alone());
  });
}

TEST(FullyShard, WithReplicas) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, grid(world, {2, 2}, {"replicas", "shards"}));
    expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 4}), alone());
    EXPECT_EQ(placements_of(model->head->weight), (Placements{Replicate{}, Shard{0}}));
  });
}

TEST(FullyShard, Replicate) {
  comm::run_ranks(3, 60s, [](comm::World& world) {
    Model model = same_model();
    for (const auto& block : *model->blocks) replicate(*block, line(world));
    replicate(*model, line(world));
    expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 3}), alone());
    EXPECT_EQ(placements_of(model->head->weight), (Placements{Replicate{}}));
  });
}

// Every parameter with two dims is sharded along its last one, which no number of ranks here divides evenly
// for all of them.
TEST(FullyShard, AnyDimUnevenly) {
  comm::run_ranks(3, 60s, [](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world), {.shard_placement = [](const std::string&, const at::Tensor& p) {
                      return Shard{p.dim() - 1};
                    }});
    const ShardedParameter& weight = shard_of(model->head->weight)->parameter();
    EXPECT_FALSE(weight.layout().even());
    EXPECT_EQ(weight.layout().dim(), 1);
    expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 3}), alone());
  });
}

TEST(FullyShard, ReshardingToFewerRanksAndNotAtAll) {
  for (const ReshardAfterForward choice :
       {ReshardAfterForward(false), ReshardAfterForward(true), ReshardAfterForward(ReshardTo{2})})
    comm::run_ranks(4, 60s, [&](comm::World& world) {
      Model model = same_model();
      shard_by_blocks(model, line(world), {.reshard_after_forward = choice});
      const at::Tensor tokens = shared_tokens(0);
      const at::Tensor out = model->forward(tokens);
      ShardState* first = shard_state_of(*model->blocks[0]);
      ASSERT_NE(first, nullptr);
      const ShardGroupState expected = std::holds_alternative<ReshardTo>(choice)
                                           ? ShardGroupState::ShardedPostForward
                                       : std::get<bool>(choice) ? ShardGroupState::Sharded
                                                                : ShardGroupState::Unsharded;
      EXPECT_EQ(to_text(first_group(*first)->state()), to_text(expected));
      EXPECT_EQ(is_dtensor(model->blocks[0]->as<BlockImpl>()->up->weight),
                expected != ShardGroupState::Unsharded)
          << "the module sees the shard";
      out.sum().backward();
      EXPECT_EQ(to_text(first_group(*first)->state()), "Sharded");
      model->zero_grad();
      expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 4}), alone());
    });
}

struct Accumulation {
  bool reduce_each, reshard, all_reduce_each;
};

TEST(FullyShard, Accumulation) {
  for (const Accumulation how :
       {Accumulation{true, true, true}, {false, true, true}, {false, false, true}, {true, true, false}})
    comm::run_ranks(4, 60s, [&](comm::World& world) {
      SCOPED_TRACE(fmt::format("reduce each {}, reshard {}, all-reduce each {}", how.reduce_each, how.reshard,
                               how.all_reduce_each));
      Model model = same_model();
      shard_by_blocks(model, grid(world, {2, 2}, {"replicas", "shards"}));
      ShardState& state = *shard_state_of(*model);
      const auto before = [&](int step, int micro) {
        const bool last = micro == 2;
        state.set_requires_gradient_sync(how.reduce_each || last);
        state.set_reshard_after_backward(how.reshard || last);
        state.set_requires_all_reduce(how.all_reduce_each || last);
        state.set_is_last_backward(last || how.all_reduce_each);
        if (micro > 0) {
          const bool gathered = first_group(state)->state() == ShardGroupState::Unsharded;
          EXPECT_EQ(gathered, !how.reshard);
          if (step == 0) {
            EXPECT_EQ(model->head->weight.grad().defined(), how.reduce_each && how.all_reduce_each);
          }
        }
      };
      expect_same_parameters(
          train_share(model, {.rank = world.rank(), .ranks = 4, .microbatches = 3, .before_micro = before}),
          alone());
    });
}

// The head is the embedding, and a block is used twice.
struct TiedImpl : nn::Module {
  TiedImpl() {
    embed = register_module("embed", nn::Embedding(kVocabulary, kWidth));
    block = register_module("block", Block());
    same = register_module("same", block);
    frozen = register_parameter("frozen", at::full({3, kWidth}, 0.5, at::kDouble), false);
    unused = register_parameter("unused", at::ones({5}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return at::linear(same(block(embed(tokens))) + frozen.sum(0), embed->weight);
  }
  nn::Embedding embed{nullptr};
  Block block{nullptr}, same{nullptr};
  at::Tensor frozen, unused;
};

std::shared_ptr<TiedImpl> tied_model() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  auto model = std::make_shared<TiedImpl>();
  model->to(at::kDouble);
  return model;
}

void train_tied(TiedImpl& model, int rank, int ranks) {
  std::vector<at::Tensor> used;
  for (const auto& item : model.named_parameters())
    if (item.value().requires_grad()) used.push_back(item.value());
  torch::optim::SGD optimizer(used, torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor tokens = shared_tokens(step).chunk(ranks)[static_cast<std::size_t>(rank)];
    nn::functional::cross_entropy(model.forward(tokens).reshape({-1, kVocabulary}),
                                  tokens.roll(1, 1).reshape({-1}))
        .backward();
    EXPECT_FALSE(model.unused.grad().defined()) << "no rank has used it";
    EXPECT_FALSE(model.frozen.grad().defined());
    optimizer.step();
  }
}

void check_tied(int ranks, const std::function<comm::MeshGroups(comm::World&)>& mesh_of) {
  const auto whole = tied_model();
  train_tied(*whole, 0, 1);
  comm::run_ranks(ranks, 60s, [&](comm::World& world) {
    const auto model = tied_model();
    const comm::MeshGroups mesh = mesh_of(world);
    fully_shard(*model->block, mesh);
    fully_shard(*model->embed, mesh);
    const auto root = fully_shard(*model, mesh);
    EXPECT_EQ(first_group(*root)->parameters().size(), 2u) << "the tied weight belongs to the embedding";
    train_tied(*model, world.rank(), ranks);
    const auto expected = whole->named_parameters();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(at::allclose(full_tensor(item.value().detach()), expected[item.key()])) << item.key();
  });
}

TEST(FullyShard, TiedFrozenAndUnusedParameters) { check_tied(2, line); }
TEST(FullyShard, TiedFrozenAndUnusedParametersWithReplicas) {
  check_tied(4, [](comm::World& world) { return grid(world, {2, 2}, {"replicas", "shards"}); });
}

// A rank without a gradient contributes zeros, also if it does not use the group at all.
TEST(FullyShard, RanksThatUseDifferentParameters) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    struct Branches : nn::Module {
      Branches() {
        first = register_module("first", nn::Linear(4, 4));
        second = register_module("second", nn::Linear(4, 4));
        third = register_module("third", nn::Linear(4, 4));
        last = register_module("last", nn::Linear(4, 4));
      }
      nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, last{nullptr};
    };
    auto model = std::make_shared<Branches>();
    {
      const at::NoGradGuard no_grad;
      for (auto& p : model->parameters()) p.fill_(0.5);
    }
    const comm::MeshGroups mesh = line(world);
    for (const auto& child : model->children()) fully_shard(*child, mesh);
    fully_shard(*model, mesh);
    const at::Tensor x = at::ones({2, 4});
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      // Both ranks gather `second`, but only rank 0 lets a gradient through; neither uses `third`.
      const at::Tensor h = model->first(x);
      const at::Tensor s = model->second(h);
      model->last(world.rank() == 0 ? s : s.detach()).sum().backward();
      const at::Tensor grad = model->second->weight.grad();
      ASSERT_TRUE(grad.defined()) << "rank 0 has one";
      // `last` has weights 0.5: each output of `second` counts 4 * 0.5; inputs are 2.5; two rows; averaged
      // over two ranks.
      EXPECT_TRUE(at::allclose(full_tensor(grad), at::full({4, 4}, 2.0 * 2.5 * 2 / 2)));
      EXPECT_TRUE(model->first->weight.grad().defined());
      EXPECT_FALSE(model->third->weight.grad().defined());
    }
  });
}

TEST(FullyShard, EvaluationWithoutGradients) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Model model = same_model(), reference = same_model();
    shard_by_blocks(model, line(world));
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i)
      EXPECT_TRUE(at::allclose(model->forward(shared_tokens(i)), reference->forward(shared_tokens(i))));
    ensure_sharded(model->parameters());
    for (const auto& p : model->parameters()) EXPECT_TRUE(is_dtensor(p));
  });
}

TEST(FullyShard, MixedPrecisionIsThatOfACastModel) {
  // Computed in float32, kept in float64.
  Model cast = same_model();
  cast->to(at::kFloat);
  const at::Tensor expected = cast->forward(shared_tokens(0));
  expected.sum().backward();
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world),
                    {.mixed_precision = {.param_dtype = at::kFloat, .reduce_dtype = at::kDouble}});
    const at::Tensor out = model->forward(shared_tokens(0));
    EXPECT_EQ(out.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(out, expected));
    out.sum().backward();
    EXPECT_EQ(model->head->weight.scalar_type(), at::kDouble);
    EXPECT_EQ(model->head->weight.grad().scalar_type(), at::kDouble);
    EXPECT_TRUE(at::allclose(full_tensor(model->head->weight.grad()),
                             cast->head->weight.grad().to(at::kDouble), 1e-4, 1e-5));
  });
}

// Gradients in bfloat16, accumulated over microbatches and averaged over shards and replicas: bitwise equal
// to one process with the same parts, rounding where the documentation says.
TEST(FullyShard, HalfPrecisionAccumulationBitForBit) {
  const auto make = [] {
    nn::Linear layer(6, 5);
    const at::NoGradGuard no_grad;
    layer->weight.copy_(at::randn({5, 6}, at::detail::createCPUGenerator(1)));
    layer->bias.copy_(at::randn({5}, at::detail::createCPUGenerator(2)));
    return layer;
  };
  const auto input = [](int rank, int micro) {
    return at::randn({3, 6},
                     at::detail::createCPUGenerator(static_cast<std::uint64_t>(10 * rank + micro + 5)));
  };
  const auto loss = [](const at::Tensor& y) { return y.to(at::kFloat).pow(3).mean(); };
  std::vector<at::Tensor> sums;
  for (int rank = 0; rank < 4; ++rank) {
    nn::Linear layer = make();
    layer->to(at::kBFloat16);
    for (int micro = 0; micro < 3; ++micro) loss(layer(input(rank, micro).to(at::kBFloat16))).backward();
    sums.push_back(layer->weight.grad().clone());
  }
  const auto average = [](const at::Tensor& a, const at::Tensor& b) {
    return ((a.to(at::kFloat) + b.to(at::kFloat)) / 2).to(at::kBFloat16);
  };
  const at::Tensor expected = average(average(sums[0], sums[1]), average(sums[2], sums[3])).to(at::kFloat);
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    nn::Linear layer = make();
    const auto state = fully_shard(*layer, grid(world, {2, 2}, {"replicas", "shards"}),
                                   {.mixed_precision = {.param_dtype = at::kBFloat16}});
    for (int micro = 0; micro < 3; ++micro) {
      state->set_requires_gradient_sync(micro == 2);
      loss(layer(input(world.rank(), micro))).backward();
    }
    EXPECT_TRUE(at::equal(full_tensor(layer->weight.grad()), expected));
  });
}

TEST(FullyShard, OffloadedShards) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world), {.offload = {.to_cpu = true}});
    expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 2}), alone());
  });
}

TEST(FullyShard, IgnoredAndStridedParameters) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    Model model = same_model();
    {
      // Stored transposed.
      const at::NoGradGuard no_grad;
      model->head->weight.set_data(model->head->weight.t().contiguous().t());
      ASSERT_FALSE(model->head->weight.is_contiguous());
    }
    const at::Tensor ignored = model->norm->weight;
    fully_shard(*model, line(world), {.ignored = {ignored}});
    EXPECT_FALSE(is_dtensor(ignored));
    EXPECT_FALSE(shard_of(ignored).has_value());
    const auto before = [&](int) {
      // Parameters that are not sharded must be averaged by the user.
      at::Tensor grad = ignored.grad();
      world.group().all_reduce(grad, comm::ReduceOp::Avg).wait();
    };
    expect_same_parameters(train_share(model, {.rank = world.rank(), .ranks = 2, .before_step = before}),
                           alone());
  });
}

}  // namespace fully_shard_test
}  // namespace penstock
