// A trial is repeated if something changed that its result may depend on.
#include <gtest/gtest.h>

#include "penstock/pipeline.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/pipeline/parity_scenarios.h"
#include "tests/pipeline/trial_kinds.h"

namespace penstock {
namespace plan_key_test {

using namespace std::chrono_literals;
using test::Block;
using test::kTrials;
using test::kWidth;
using test::values;
using test::with;

TEST(StagePlans, AnIntegerThatChangesAShape) {
  for (const TrialRun trial : kTrials)
    comm::run_ranks(2, 20s, [&](comm::World& world) {
      Block block(world.rank());
      const StageModule module(
          [block, &world](at::Tensor x, const Tree& kwargs) mutable {
            const at::Tensor h = block->forward(x);
            return world.rank() == 0 ? h.repeat({1, kwargs["times"].integer(), 1}) : h;
          },
          {block.ptr()});
      Schedule1F1B pipeline(PipelineStage(module, world.rank(), 2, at::kCPU, with(trial)), 2,
                            [](const at::Tensor& y, const at::Tensor& t) { return (y - t).pow(2).mean(); },
                            {world});
      for (const int times : {1, 3, 1, 2}) {
        const StepResult result = pipeline.step(Tree::tuple({values({4, 1, kWidth}, 3)}),
                                                Tree::dict({{"times", times}}), values({4, 1, kWidth}, 4));
        if (world.rank() == 1) {
          EXPECT_EQ(result.output->tensor().sizes(), (std::vector<std::int64_t>{4, times, kWidth}));
        }
      }
      EXPECT_EQ(pipeline.report().trials, 3);
    });
}

// A frozen first stage sends tensors that need no gradient.
TEST(StagePlans, ParametersThatAreFrozenAndUnfrozenBetweenSteps) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    Block block(world.rank());
    Schedule1F1B pipeline(PipelineStage(StageModule(block), world.rank(), 2, at::kCPU), 2,
                          test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 4);
    for (const bool trains : {false, true, false, true}) {
      if (world.rank() == 0)
        for (const at::Tensor& parameter : block->parameters()) parameter.set_requires_grad(trains);
      block->zero_grad();
      pipeline.step(batch.args, {}, batch.target);
      const at::Tensor gradient = block->weight.grad();
      if (world.rank() == 0) {
        EXPECT_EQ(gradient.defined() && gradient.abs().sum().item<double>() > 0, trains);
      }
    }
    EXPECT_EQ(pipeline.report().trials, 2);
  });
}

TEST(StagePlans, EvalModeAndOtherDtypes) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    struct HeadsImpl : torch::nn::Module {
      explicit HeadsImpl(int stage) : block(register_module("block", Block(stage))) {}
      at::Tensor forward(const at::Tensor& x) {
        const at::Tensor h = block->forward(x.to(block->weight.scalar_type()));
        return is_training() ? at::cat({h, h}) : h;
      }
      Block block;
    };
    auto module = std::make_shared<HeadsImpl>(world.rank());
    Schedule1F1B pipeline(PipelineStage(StageModule(module), world.rank(), 2, at::kCPU), 2, {}, {world});
    const Tree args = test::plain_batch(0, 4).args;
    const auto output = [&] {
      const StepResult result = pipeline.eval(args);
      return world.rank() == 1 ? result.output->tensor() : at::empty({0});
    };
    const bool last = world.rank() == 1;
    EXPECT_EQ(output().size(0), last ? 16 : 0);
    module->eval();
    EXPECT_EQ(output().size(0), last ? 4 : 0);
    module->to(at::kDouble);
    EXPECT_EQ(output().scalar_type(), last ? at::kDouble : at::kFloat);
    {
      module->to(at::kFloat);
      const AutocastScope scope(at::kCPU, at::kBFloat16);
      EXPECT_EQ(output().size(0), last ? 4 : 0);
    }
    EXPECT_EQ(pipeline.report().trials, 4);
  });
}

}  // namespace plan_key_test
}  // namespace penstock
