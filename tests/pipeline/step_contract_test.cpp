// Guarantees of a step beyond its numbers: when gradients are complete, what results and evaluation keep, how
// often sharded stages communicate. Parity tests cannot detect these.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <set>

#include "penstock/comm/record/recorder.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/pipeline.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/step_context.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"
#include "tests/throws.h"

namespace penstock {
namespace step_contract_test {

using namespace std::chrono_literals;
using test::Block;
using test::has_text;
using test::kWidth;
using test::message_of;

schedule::Schedule schedule_of(const char* name, int ranks, int per_rank, int microbatches) {
  return schedule::generate(
      schedule::schedule_kind(name),
      {.ranks = ranks, .stages_per_rank = per_rank, .microbatches = microbatches, .group_size = {}});
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters)
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  return gradients;
}

void expect_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                  const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(actual[i].defined()) << what << ", parameter " << i;
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << what << ", parameter " << i;
  }
}

TEST(StepContract, GradientsDoneIsCalledOnceAStageWithFinalGradients) {
  for (const char* name : {"1F1B", "ZB2P"})
    comm::run_ranks(2, 20s, [&](comm::World& world) {
      const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU);
      std::vector<int> called;
      std::vector<at::Tensor> seen;
      PipelineOptions options{world};
      options.gradients_done = [&](int index) {
        called.push_back(index);
        seen = gradients_of(stage.parameters());
      };
      PipelineRuntime pipeline({stage}, schedule_of(name, 2, 1, 4), test::square_loss(), options);
      const test::Batch batch = test::plain_batch(0, 8);
      pipeline.step(batch.args, {}, batch.target);
      EXPECT_EQ(called, std::vector<int>{world.rank()}) << name;
      expect_equal(seen, gradients_of(stage.parameters()), name);
    });
}

TEST(StepContract, TheLossScaleMultipliesEveryGradient) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const auto gradients_at = [&](double scale) {
      const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU);
      PipelineOptions options{world};
      options.loss_scale = scale;
      Schedule1F1B pipeline(stage, 4, test::square_loss(), options);
      const test::Batch batch = test::plain_batch(0, 8);
      pipeline.step(batch.args, {}, batch.target);
      return gradients_of(stage.parameters());
    };
    std::vector<at::Tensor> expected = gradients_at(1);
    for (at::Tensor& gradient : expected) gradient = gradient * 8;  // a power of two: exact
    expect_equal(gradients_at(8), expected, "scaled by 8");
  });
}

// Deferred layers compute their weight gradients within their own microbatch unless they are set to join.
TEST(StepContract, DeferredLayersThatAreNotJoinedGetTheirGradients) {
  for (const char* name : {"1F1B", "ZB2P"})
    comm::run_ranks(2, 20s, [&](comm::World& world) {
      const auto gradients_with = [&](StageModule module) {
        const PipelineStage stage(std::move(module), world.rank(), 2, at::kCPU);
        PipelineRuntime pipeline({stage}, schedule_of(name, 2, 1, 4), test::square_loss(), {world});
        const test::Batch batch = test::plain_batch(0, 8);
        pipeline.step(batch.args, {}, batch.target);
        return gradients_of(stage.parameters());
      };
      expect_equal(gradients_with(StageModule(test::JoinedBlock(world.rank()))),
                   gradients_with(StageModule(Block(world.rank()))), name);
    });
}

TEST(StepContract, ResultsHoldNoGraph) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU);
    Schedule1F1B pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 8);
    const StepResult result = pipeline.step(batch.args, {}, batch.target);
    if (world.rank() != 1) return;
    EXPECT_FALSE(result.output->tensor().requires_grad());
    for (const at::Tensor& loss : result.losses) EXPECT_FALSE(loss.requires_grad());
  });
}

TEST(StepContract, EvaluationRunsWithoutGradMode) {
  comm::run_ranks(1, 20s, [](comm::World& world) {
    Block block(0);
    std::vector<bool> modes;
    const StageModule module(
        [block, &modes](at::Tensor x) mutable {
          if (!StepContext::current()->trial) modes.push_back(at::GradMode::is_enabled());
          return block->forward(x);
        },
        {block.ptr()});
    ScheduleGPipe pipeline(PipelineStage(module, 0, 1, at::kCPU), 2, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 4);
    pipeline.eval(batch.args, {}, batch.target);
    EXPECT_EQ(modes, (std::vector<bool>{false, false}));
    modes.clear();
    pipeline.step(batch.args, {}, batch.target);
    EXPECT_EQ(modes, (std::vector<bool>{true, true}));
  });
}

TEST(StepContract, ALossOfSeveralElementsIsRefused) {
  const std::string message = message_of<ValueError>([] {
    comm::run_ranks(1, 20s, [](comm::World& world) {
      const PipelineLoss per_row([](const at::Tensor& output, const at::Tensor& target) {
        return (output - target).pow(2).mean(1);
      });
      StageOptions options;
      options.input_args =
          options.output_args = {at::empty({2, kWidth})};  // no trial run that would fail first
      ScheduleGPipe pipeline(PipelineStage(StageModule(Block(0)), 0, 1, at::kCPU, options), 2, per_row,
                             {world});
      const test::Batch batch = test::plain_batch(0, 4);
      pipeline.step(batch.args, {}, batch.target);
    });
  });
  EXPECT_TRUE(has_text(message, "a tensor with one element")) << message;
}

// The trial run did not use the input; a later microbatch does, and its gradient cannot be sent.
TEST(StepContract, AGradientThatTheTrialDidNotFindIsRefused) {
  const std::string message = message_of<PipeliningMetadataError>([] {
    comm::run_ranks(2, 20s, [](comm::World& world) {
      Block block(world.rank());
      const StageModule module(
          [block, &world](const Tree& args, const Tree&) mutable {
            const at::Tensor h = block->forward(args[0].tensor());
            if (world.rank() == 0) return Tree::tuple({h, h.sin()});
            return Tree(StepContext::current()->trial ? h : h + args[1].tensor());
          },
          {block.ptr()});
      Schedule1F1B pipeline(PipelineStage(module, world.rank(), 2, at::kCPU), 2, test::square_loss(),
                            {world});
      const test::Batch batch = test::plain_batch(0, 4);
      pipeline.step(batch.args, {}, batch.target);
    });
  });
  EXPECT_TRUE(has_text(message, "gradient of input 1 of stage 1")) << message;
}

// A bidirectional pipeline has two copies of each part. Microbatch 0 runs through only one of them.
TEST(StepContract, AGradientThatOneCopyHasReachesTheOther) {
  struct Gated : torch::nn::Module {
    explicit Gated(int part) : block(register_module("block", Block(part))) {
      extra = register_parameter("extra", at::ones({kWidth}));
    }
    at::Tensor forward(const at::Tensor& x) {
      const bool first = StepContext::current()->microbatch == 0;
      return block(first ? x * extra : x);
    }
    Block block;
    at::Tensor extra;
  };
  constexpr int kMicrobatches = 4;
  const test::Batch batch = test::plain_batch(0, 2 * kMicrobatches);
  // One process: the mean over microbatches of losses that are means.
  std::vector<std::shared_ptr<Gated>> parts{std::make_shared<Gated>(0), std::make_shared<Gated>(1)};
  for (int m = 0; m < kMicrobatches; ++m) {
    StepContext context;
    context.microbatches = kMicrobatches;
    context.microbatch = m;
    const StepGuard guard(context);
    at::Tensor x = batch.args[0].tensor().tensor_split(kMicrobatches)[static_cast<std::size_t>(m)];
    for (const auto& part : parts) x = part->forward(x);
    test::square_loss()(Tree(x),
                        Tree(batch.target.tensor().tensor_split(kMicrobatches)[static_cast<std::size_t>(m)]))
        .div(kMicrobatches)
        .backward();
  }
  comm::run_ranks(2, 20s, [&](comm::World& world) {
    const schedule::Schedule schedule = schedule_of("DualPipe", 2, 2, kMicrobatches);
    std::vector<PipelineStage> mine;
    std::vector<std::pair<int, std::shared_ptr<Gated>>> modules;
    for (const int stage : schedule.stages().stages_of(world.rank())) {
      const int part = stage % 2;
      modules.emplace_back(part, std::make_shared<Gated>(part));
      mine.emplace_back(StageModule(modules.back().second), stage, 4, at::kCPU);
    }
    PipelineRuntime pipeline(mine, schedule, test::square_loss(), {world});
    pipeline.step(batch.args, {}, batch.target);
    for (const auto& [part, module] : modules) {
      const at::Tensor expected = parts[static_cast<std::size_t>(part)]->extra.grad();
      ASSERT_TRUE(module->extra.grad().defined()) << "part " << part << " on rank " << world.rank();
      EXPECT_TRUE(at::allclose(module->extra.grad(), expected, 1e-5, 1e-7))
          << "part " << part << " on rank " << world.rank();
    }
  });
}

// ---- sharded stages ----

struct ShardedWorld {
  comm::MeshGroups mesh;
  std::vector<int> ranks;  // of this replica's pipeline
};

ShardedWorld two_by_two(comm::World& world) {
  const comm::MeshGroups all(world,
                             init_device_mesh("cpu", {2, 2}, {"pp", "dp"}, world.rank(), world.size()));
  return {all.with_mesh(all.mesh()["dp"]), {world.rank() % 2, 2 + world.rank() % 2}};
}

TEST(StepContract, AShardedStageReducesOnceAStep) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const ShardedWorld layout = two_by_two(world);
    const int own = world.rank() / 2;
    Block block(own);
    fully_shard(*block, layout.mesh);
    PipelineOptions options{world};
    options.ranks = layout.ranks;
    PipelineRuntime pipeline({PipelineStage(StageModule(block), own, 2, at::kCPU)},
                             schedule_of("1F1B", 2, 1, 4), test::square_loss(), options);
    const test::Batch batch = test::plain_batch(0, 8);
    pipeline.step(batch.args, {}, batch.target);  // ranks agree on everything
    const auto meet = [&] { world.group().barrier().wait(); };
    meet();
    if (world.rank() == 0) comm::Recorder::global().reset_totals();
    meet();
    pipeline.step(batch.args, {}, batch.target);
    meet();
    const auto totals = comm::Recorder::global().totals();
    meet();
    EXPECT_EQ(totals.at("reduce_scatter").operations, 4U)
        << "one for each of the four ranks, not one for each microbatch";
  });
}

TEST(StepContract, ReshardFreesWhatTheScheduleNoLongerNeeds) {
  static constexpr int kStages =
      6;  // on the one rank of each pipeline; a lowered schedule gathers at most three at a time
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {"dp"}, world.rank(), 2));
    std::vector<PipelineStage> stages;
    std::vector<ShardGroup*> groups;
    for (int stage = 0; stage < kStages; ++stage) {
      Block block(stage);
      groups.push_back(first_group(*fully_shard(*block, mesh)));
      stages.emplace_back(StageModule(block), stage, kStages, at::kCPU);
    }
    PipelineOptions options{world};
    options.ranks = {world.rank()};
    PipelineRuntime pipeline(stages, schedule_of("LoopedBFS", 1, kStages, 2), test::square_loss(), options);
    const test::Batch batch = test::plain_batch(0, 4);
    pipeline.step(batch.args, {}, batch.target);
    std::size_t most = 0;
    pipeline.set_instruction_observer([&] {
      std::size_t gathered = 0;
      for (const ShardGroup* group : groups) gathered += group->state() == ShardGroupState::Unsharded;
      most = std::max(most, gathered);
    });
    pipeline.step(batch.args, {}, batch.target);
    EXPECT_GE(most, 1U);
    EXPECT_LE(most, 3U);
  });
}

}  // namespace step_contract_test
}  // namespace penstock
