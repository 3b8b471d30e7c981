// The model over ranks: tensor parallel, as stages of a pipeline, and both, against one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/models/transformer/parallel_plan.h"
#include "penstock/pipeline.h"
#include "penstock/transformer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace model_parallel_test {

using namespace std::chrono_literals;
using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

// Sums over ranks are in another order; in float64 that is a few units in the last place.
constexpr double kTolerance = 1e-12;

struct Expected {
  at::Tensor logits;
  double loss = 0;
  Gradients gradients;
};

constexpr std::int64_t kBatch = 4, kLength = 8;
at::Tensor inputs(const TransformerOptions& options) { return tokens_for(options, kBatch, kLength); }
at::Tensor targets(const TransformerOptions& options) {
  at::Tensor all = tokens_for(options, kBatch, kLength, 2);
  all[1].narrow(0, 0, 5).fill_(kIgnoredTarget);
  return all;
}
at::Tensor documents() {
  return at::arange(kLength).div(3, "floor").to(at::kLong).expand({kBatch, kLength}).contiguous();
}
constexpr int kMicrobatches = 4;
constexpr double kCounted = kBatch * kLength - 5;

Expected in_one_process(const TransformerOptions& options) {
  TransformerStage model = made(options);
  Expected expected;
  expected.logits = model->forward(inputs(options), documents());
  const at::Tensor loss = token_loss(expected.logits, targets(options), kCounted);
  loss.backward();
  expected.loss = loss.item<double>();
  collect(*model, expected.gradients);
  return expected;
}

void expect_gradients(const torch::nn::Module& module, const Gradients& expected, const std::string& where) {
  for (const auto& item : module.named_parameters()) {
    ASSERT_TRUE(is_dtensor(item.value().grad())) << where << item.key();
    EXPECT_EQ(placements_of(item.value().grad()), placements_of(item.value())) << where << item.key();
    EXPECT_LT(difference(full_tensor(item.value().grad()), expected.at(item.key())), kTolerance)
        << where << item.key();
  }
}

std::mutex mutex;

TEST(ModelTensorParallel, TwoRanksWithPlainInputs) {
  for (const bool tied : {false, true}) {
    const TransformerOptions options = small(tied);  // 19 words: the vocabulary does not divide evenly
    const Expected expected = in_one_process(options);
    comm::run_ranks(2, 60s, [&](comm::World& world) {
      const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
      TransformerStage model = made(options);
      parallelize_transformer(*model, mesh);
      const at::Tensor logits = model->forward(inputs(options), documents());
      ASSERT_TRUE(is_dtensor(logits));
      EXPECT_EQ(placements_of(logits), (Placements{Shard{2}}));
      const at::Tensor loss = token_loss(logits, targets(options), kCounted);
      loss.backward();
      EXPECT_FALSE(is_dtensor(loss));
      const at::Tensor whole = full_tensor(logits.detach());
      const std::lock_guard lock(mutex);
      EXPECT_LT(difference(whole, expected.logits), kTolerance);
      EXPECT_NEAR(loss.item<double>(), expected.loss, kTolerance);
    });
    comm::run_ranks(2, 60s, [&](comm::World& world) {
      const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
      TransformerStage model = made(options);
      parallelize_transformer(*model, mesh);
      token_loss(model->forward(inputs(options), documents()), targets(options), kCounted).backward();
      expect_gradients(*model, expected.gradients, tied ? "tied, " : "untied, ");
    });
  }
}

TEST(ModelTensorParallel, DistributedInputsOnTwoByTwo) {
  const TransformerOptions options = small();
  const Expected expected = in_one_process(options);
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world.rank(), 4));
    TransformerStage model = made(options);
    parallelize_transformer(*model, mesh, "tp");
    const Placements rows{Shard{0}, Replicate{}};
    const at::Tensor logits = model->forward(distribute_tensor(inputs(options), mesh, rows),
                                             distribute_tensor(documents(), mesh, rows));
    const at::Tensor loss = token_loss(logits, distribute_tensor(targets(options), mesh, rows), kCounted);
    EXPECT_NEAR(loss.item<double>(), expected.loss, kTolerance);
    loss.backward();
    expect_gradients(*model, expected.gradients, "2 x 2, ");
    EXPECT_THROW(model->forward(inputs(options)), TypeError);  // plain inputs do not say which rows they are
  });
}

TEST(ModelTensorParallel, InitialValuesAreTheSameBits) {
  const TransformerOptions options = small(true);
  TransformerStage whole = made(options, at::kFloat);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
    TransformerStage model(options);
    parallelize_transformer(*model, mesh);
    initialize(*model, {.seed = 5, .deviation = 0.3});
    const auto expected = whole->named_parameters();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(at::equal(full_tensor(item.value().detach()), expected[item.key()])) << item.key();
  });
}

TEST(ModelTensorParallel, GeneratesTheSameTokens) {
  const TransformerOptions options = small();
  const GenerateOptions how{.max_tokens = 9, .temperature = 0.9, .top_k = 7, .seed = 4};
  const at::Tensor prompt = tokens_for(options, 2, 3), expected = generate(*made(options), prompt, how);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
    TransformerStage model = made(options);
    parallelize_transformer(*model, mesh);
    EXPECT_TRUE(at::equal(generate(*model, prompt, how), expected));
  });
}

TEST(ModelTensorParallel, MismatchesNameTheRemedy) {
  EXPECT_NO_THROW(check_tensor_parallel(small(), 2));
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([] { check_tensor_parallel(small(), 4); }), "model.key_value_heads"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { check_tensor_parallel(small(), 3); }), "model.heads"));
  EXPECT_THROW(check_tensor_parallel(small(), 0), ConfigError);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), 2));
    // Only half of a pair is split.
    TransformerStage half = made(small());
    parallelize_module(*half, mesh, {{"blocks.*.feed.gate", colwise_parallel()}});
    distribute_module(*half, mesh);
    EXPECT_TRUE(
        has_text(message_of<ValueError>([&] { half->forward(inputs(small())); }), "tensor_parallel_plan()"));
    TransformerStage norms = made(small());
    parallelize_module(*norms, mesh, tensor_parallel_plan(small()));
    EXPECT_NO_THROW(norms->forward(inputs(small())));  // plain norms with plain activations are fine
  });
}

// ---- a pipeline ----

PipelineStage pipeline_stage(TransformerStage stage) {
  return PipelineStage(
      StageModule([stage](at::Tensor x, Tree keywords) mutable { return stage->forward_with(x, keywords); },
                  {stage.ptr()}),
      stage->part().index, stage->part().count, at::kCPU);
}

TEST(ModelPipeline, LossesAndGradientsAreThoseOfOneProcess) {
  const TransformerOptions options = small();
  // One process, microbatch by microbatch: the same sums, so the same bits.
  TransformerStage whole = made(options, at::kFloat);
  std::vector<at::Tensor> losses;
  for (int m = 0; m < kMicrobatches; ++m) {
    losses.push_back(token_loss(whole->forward(inputs(options).narrow(0, m, 1), documents().narrow(0, m, 1)),
                                targets(options).narrow(0, m, 1), kCounted / kMicrobatches));
    losses.back().backward();
  }
  Gradients expected;
  collect(*whole, expected);
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    TransformerStage stage =
        made(options, partition_model(options, 2)[static_cast<std::size_t>(world.rank())], at::kFloat);
    Schedule1F1B schedule(pipeline_stage(stage), kMicrobatches,
                          [](const at::Tensor& logits, const at::Tensor& wanted) {
                            return token_loss(logits, wanted, kCounted / kMicrobatches);
                          },
                          {world});
    const StepResult result =
        schedule.step(Tree::tuple({inputs(options)}), Tree::dict({{"documents", Tree(documents())}}),
                      Tree(targets(options)));
    const std::lock_guard lock(mutex);
    if (world.rank() == 1) {
      ASSERT_EQ(result.losses.size(), losses.size());
      for (std::size_t m = 0; m < losses.size(); ++m)
        EXPECT_TRUE(at::equal(result.losses[m], losses[m].detach())) << "microbatch " << m;
    }
    for (const auto& item : stage->named_parameters())
      EXPECT_TRUE(at::equal(item.value().grad(), expected.at(item.key()) / kMicrobatches)) << item.key();
  });
}

// Two stages per rank in a V, and weight gradients separate from input gradients.
TEST(ModelPipeline, SplitBackward) {
  TransformerOptions options = small();
  options.layers = 4;
  TransformerStage whole = made(options);
  for (int m = 0; m < kMicrobatches; ++m)
    token_loss(whole->forward(inputs(options).narrow(0, m, 1), documents().narrow(0, m, 1)),
               targets(options).narrow(0, m, 1), kCounted / kMicrobatches)
        .backward();
  Gradients expected;
  collect(*whole, expected);
  const auto kind = schedule::schedule_kind("ZBVZeroBubble");
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    const auto parts = partition_model(options, 4);
    std::vector<TransformerStage> mine;
    std::vector<PipelineStage> stages;
    const auto places = schedule::rank_to_stages(schedule::placement_of(kind), 2, 4);
    for (const int index : places[static_cast<std::size_t>(world.rank())]) {
      mine.push_back(made(options, parts[static_cast<std::size_t>(index)]));
      stages.push_back(pipeline_stage(mine.back()));
    }
    PipelineRuntime pipeline = make_pipeline(
        "ZBVZeroBubble", stages, kMicrobatches,
        [](const at::Tensor& logits, const at::Tensor& wanted) {
          return token_loss(logits, wanted, kCounted / kMicrobatches);
        },
        PipelineOptions{world});
    pipeline.step(Tree::tuple({inputs(options)}), Tree::dict({{"documents", Tree(documents())}}),
                  Tree(targets(options)));
    for (const TransformerStage& stage : mine)
      for (const auto& item : stage->named_parameters())
        EXPECT_LT(difference(item.value().grad(), expected.at(item.key()) / kMicrobatches), kTolerance)
            << item.key();
  });
}

TEST(ModelPipeline, TimesTensorParallel) {
  const TransformerOptions options = small();
  const Expected expected = in_one_process(options);
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const comm::MeshGroups all(world, init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, world.rank(), 4));
    const comm::MeshGroups tp = all.with_mesh(all.mesh()["tp"]);
    TransformerStage stage =
        made(options, partition_model(options, 2)[static_cast<std::size_t>(all.coordinate()[0])]);
    parallelize_transformer(*stage, tp);
    PipelineOptions how{world};
    for (int i = 0; i < 2; ++i) how.ranks.push_back(2 * i + world.rank() % 2);
    Schedule1F1B schedule(
        pipeline_stage(stage), 2,
        [](const at::Tensor& logits, const at::Tensor& wanted) {
          return token_loss(logits, wanted, kCounted / 2);
        },
        how);
    const StepResult result =
        schedule.step(Tree::tuple({inputs(options)}), Tree::dict({{"documents", Tree(documents())}}),
                      Tree(targets(options)));
    if (all.coordinate()[0] == 1) {
      EXPECT_NEAR(at::stack(result.losses).mean().item<double>(), expected.loss, kTolerance);
    }
    expect_gradients(*stage, expected.gradients, "pipeline x tensor parallel, ");
  });
}

}  // namespace model_parallel_test
}  // namespace penstock::models
