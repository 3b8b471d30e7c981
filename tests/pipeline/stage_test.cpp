// Stages: trial runs that leave no trace, static and dynamic pipelines, custom weight steps, supported forms
// of modules.
#include <gtest/gtest.h>

#include <mutex>

#include "penstock/base/warnings.h"
#include "penstock/dropout.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/runtime/stage_runner.h"
#include "penstock/pipeline/stage/stage_state.h"
#include "penstock/step_context.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace stage_test {

using namespace std::chrono_literals;
using test::Block;
using test::has_text;
using test::kWidth;

// A module with everything that a trial run could disturb.
struct TouchyImpl : torch::nn::Module {
  TouchyImpl()
      : norm(register_module("norm", torch::nn::BatchNorm1d(kWidth))),
        linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))) {
    calls = register_buffer("calls", at::zeros({}, at::kLong));
    factor = register_buffer("factor", at::full({kWidth}, 0.5));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!StepContext::current()->trial) ++real_runs;
    calls.add_(1);
    // Backward of the product needs the old values of the buffer.
    return torch::dropout(linear(norm(x)) * factor, 0.5, true);
  }
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear linear;
  at::Tensor calls, factor;
  int real_runs = 0;
};
TORCH_MODULE(Touchy);

// Three stages: the trial of the middle one gets its output gradients from another stage.
void expect_untouched(TrialRun trial) {
  comm::run_ranks(3, 20s, [&](comm::World& world) {
    if (world.rank() == 0) torch::manual_seed(3);
    world.group().barrier().wait();
    Touchy module;
    StageOptions options;
    options.trial = trial;
    const PipelineStage stage(StageModule(module), world.rank(), 3, at::kCPU, options);
    ScheduleGPipe pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 16);
    pipeline.step(batch.args, {}, batch.target);
    EXPECT_EQ(module->calls.item<int>(), 4);
    EXPECT_EQ(module->real_runs, 4);
    EXPECT_EQ(module->norm->num_batches_tracked.item<int>(), 4);
    EXPECT_TRUE(module->factor.equal(at::full({kWidth}, 0.5)));
    if (world.rank() == 0) {
      torch::nn::BatchNorm1d alone(kWidth);
      for (const at::Tensor& part : batch.args[0].tensor().chunk(4)) alone(part);
      EXPECT_TRUE(module->norm->running_mean.equal(alone->running_mean));
      EXPECT_TRUE(module->norm->running_var.equal(alone->running_var));
    }
    for (const at::Tensor& buffer : module->buffers()) EXPECT_FALSE(buffer.requires_grad());
    for (const at::Tensor& parameter : module->parameters()) EXPECT_TRUE(parameter.grad().defined());
    EXPECT_EQ(pipeline.report().trials, 1);
    // Shapes are known now.
    pipeline.step(batch.args, {}, batch.target);
    EXPECT_EQ(pipeline.report().trials, 1);
    EXPECT_EQ(module->calls.item<int>(), 8);
  });
}

TEST(Stage, ATrialRunLeavesNoTrace) { expect_untouched(TrialRun::Fake); }
TEST(Stage, ARealTrialRunLeavesNoTrace) { expect_untouched(TrialRun::Real); }

TEST(Stage, RandomNumbersAreThoseOfARunWithoutTrial) {
  const auto output_of = [](TrialRun trial, bool examples) {
    at::Tensor output;
    comm::run_ranks(1, 20s, [&](comm::World& world) {
      torch::manual_seed(5);
      StageOptions options;
      options.trial = trial;
      if (examples) options.input_args = options.output_args = {at::empty({2, kWidth})};
      const PipelineStage stage(StageModule([](at::Tensor x) { return torch::dropout(x, 0.5, true); }, {}), 0,
                                1, at::kCPU, options);
      ScheduleGPipe pipeline(stage, 4, {}, {world});
      output = pipeline.eval(test::plain_batch(0, 8).args).output->tensor();
      EXPECT_EQ(pipeline.report().trials, examples ? 0 : 1);
    });
    return output;
  };
  const at::Tensor without = output_of(TrialRun::Auto, true);
  EXPECT_TRUE(output_of(TrialRun::Fake, false).equal(without));
  EXPECT_TRUE(output_of(TrialRun::Real, false).equal(without));
}

TEST(Stage, StaticPipelinesMakeNoTrial) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    StageOptions options;
    options.input_args = options.output_args = {at::empty({2, kWidth})};
    const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU, options);
    EXPECT_FALSE(needs_trial(stage, true));
    Schedule1F1B pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 8);
    pipeline.step(batch.args, {}, batch.target);
    EXPECT_TRUE(pipeline.report().is_static);
    EXPECT_EQ(pipeline.report().trials, 0);
    for (const at::Tensor& parameter : stage.parameters()) EXPECT_TRUE(parameter.grad().defined());
    // Nine rows: microbatches of three and of two; only the one that is new is tried.
    const test::Batch uneven = test::plain_batch(1, 9);
    pipeline.step(uneven.args, {}, uneven.target);
    EXPECT_EQ(pipeline.report().trials, 1);
  });
}

TEST(Stage, EvaluationAndTrainingAreTriedOnceEach) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU);
    EXPECT_TRUE(needs_trial(stage, false));
    Schedule1F1B pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 8);
    for (int i = 0; i < 3; ++i) {
      pipeline.step(batch.args, {}, batch.target);
      const StepResult result = pipeline.eval(batch.args, {}, batch.target);
      if (world.rank() == 1) {
        EXPECT_EQ(result.losses.size(), 4U);
        EXPECT_FALSE(result.output->tensor().requires_grad());
      }
    }
    EXPECT_EQ(pipeline.report().trials, 2);
  });
}

TEST(Stage, CustomWeightStep) {
  for (const char* name : {"1F1B", "ZB2P"}) {
    SCOPED_TRACE(name);
    comm::run_ranks(2, 20s, [&](comm::World& world) {
      // "b2": the builder was called in the backward of microbatch 2; "w2": the function it returned ran as
      // part of microbatch 2's W, or of its B.
      std::vector<std::string> events;
      StageOptions options;
      options.weight_step_builder = [&] {
        const auto microbatch = std::to_string(*StepContext::current()->microbatch);
        events.push_back("b" + microbatch);
        return [&events, microbatch] {
          EXPECT_EQ(std::to_string(*StepContext::current()->microbatch), microbatch);
          events.push_back("w" + microbatch);
        };
      };
      const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU, options);
      PipelineRuntime pipeline = make_pipeline(name, {stage}, 4, test::square_loss(), {world});
      const test::Batch batch = test::plain_batch(0, 8);
      pipeline.step(batch.args, {}, batch.target);
      // Where the schedule has them: an I only builds, its W runs later; a B does both.
      std::vector<std::string> expected;
      bool waits = false;
      for (const schedule::Slot slot : pipeline.schedule().row(world.rank()))
        for (const schedule::Action& action : slot) {
          if (!schedule::is_compute(action.kind())) continue;
          const auto microbatch = std::to_string(*action.microbatch());
          if (action.kind() == schedule::ActionKind::Backward ||
              action.kind() == schedule::ActionKind::BackwardInput)
            expected.push_back("b" + microbatch);
          if (action.kind() == schedule::ActionKind::Backward ||
              action.kind() == schedule::ActionKind::BackwardWeight) {
            waits = waits || expected.back() != "b" + microbatch;
            expected.push_back("w" + microbatch);
          }
        }
      EXPECT_EQ(events, expected);
      EXPECT_EQ(events.size(), 8U);
      // In ZB2P another action comes between an I and its W, at least on the first rank: running W
      // immediately would be detected.
      if (name == std::string("ZB2P") && world.rank() == 0) {
        EXPECT_TRUE(waits);
      }
      // The whole backward has run: gradients are defined.
      for (const at::Tensor& parameter : stage.parameters()) EXPECT_TRUE(parameter.grad().defined());
    });
  }
}

TEST(Stage, TheLastStageMayReturnAnything) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    Block block(world.rank());
    const StageModule module(
        [block, &world](at::Tensor x) mutable {
          const at::Tensor h = block->forward(x);
          return world.rank() == 1 ? Tree::dict({{"logits", h}, {"name", "batch"}}) : Tree(h);
        },
        {block.ptr()});
    const PipelineStage stage(module, world.rank(), 2, at::kCPU);
    Schedule1F1B pipeline(stage, 4,
                          [](const Tree& output, const Tree& target) {
                            return (output["logits"].tensor() - target.tensor()).pow(2).mean();
                          },
                          {world});
    const test::Batch batch = test::plain_batch(0, 8);
    const StepResult result = pipeline.step(batch.args, {}, batch.target);
    if (world.rank() != 1) return;
    EXPECT_EQ((*result.output)["logits"].tensor().size(0), 8);
    EXPECT_EQ((*result.output)["name"].text(), "batch");
  });
}

TEST(Stage, ModulesOfManyForms) {
  const at::Tensor x = at::ones({2, 4}), y = at::full({2, 4}, 2.0);
  torch::nn::Linear linear(4, 4);
  EXPECT_TRUE(StageModule(linear).forward(Tree::tuple({x}), {}).tensor().equal(linear(x)));
  torch::nn::Sequential sequential(linear, torch::nn::Tanh());
  EXPECT_TRUE(StageModule(sequential).forward(Tree::tuple({x}), {}).tensor().equal(linear(x).tanh()));
  const StageModule two([](const at::Tensor& a, const at::Tensor& b) { return std::make_tuple(a + b, a); },
                        {});
  EXPECT_TRUE(two.forward(Tree::tuple({x, y}), {})[0].tensor().equal(x + y));
  EXPECT_THROW(two.forward(Tree::tuple({x, y, x}), {}), ValueError);
  EXPECT_THROW(two.forward(Tree::tuple({x, y}), Tree::dict({{"scale", 2.0}})), ValueError);
  const StageModule keyword(
      [](const at::Tensor& a, const Tree& kwargs) { return a * kwargs["scale"].number(); }, {});
  EXPECT_TRUE(keyword.takes_kwargs());
  EXPECT_TRUE(keyword.forward(Tree::tuple({x}), Tree::dict({{"scale", 2.0}})).tensor().equal(y));
  const StageModule chain = StageModule::chain({two, keyword});
  EXPECT_THROW(chain.forward(Tree::tuple({x, y}), Tree::dict({{"scale", 2.0}})),
               ValueError);  // two results, one taken
  const StageModule good = StageModule::chain({StageModule(linear), keyword, StageModule(linear)});
  EXPECT_TRUE(
      good.forward(Tree::tuple({x}), Tree::dict({{"scale", 2.0}})).tensor().equal(linear(linear(x) * 2.0)));
  EXPECT_EQ(good.parameters().size(), 2U);  // shared by two blocks
  EXPECT_EQ(good.block_count(), 3U);
  EXPECT_THROW(StageModule::chain({}), ValueError);
  const StageModule optional_mask(
      [](const at::Tensor& a, const at::Tensor& mask) { return mask.defined() ? a * mask : a; }, {});
  EXPECT_TRUE(optional_mask.forward(Tree::tuple({x}), {}).tensor().equal(x));
}

// Dropout keyed by the step is the same in a pipeline and in one process.
TEST(Stage, ModulesReadTheStepContext) {
  std::vector<std::int64_t> seen;
  comm::run_ranks(1, 20s, [&](comm::World& world) {
    const StageModule module(
        [&](at::Tensor x) {
          const auto context = StepContext::current();
          if (!context->trial) seen.push_back(context->step * 100 + *context->microbatch);
          EXPECT_EQ(context->microbatches, context->trial ? 1 : 2);
          return x * 2;
        },
        {});
    PipelineOptions options{world};
    options.seed = 17;
    ScheduleGPipe pipeline(
        PipelineStage(module, 0, 1, at::kCPU), 2,
        [](const at::Tensor& y, const at::Tensor&) { return (y * at::ones({}, at::requires_grad())).sum(); },
        options);
    const test::Batch batch = test::plain_batch(0, 4);
    pipeline.step(batch.args, {}, batch.target);
    pipeline.step(batch.args, {}, batch.target);
  });
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 100, 101}));
}

TEST(Stage, ActionsOutOfOrderAreRefused) {
  const PipelineStage stage(StageModule(Block(0)), 0, 1, at::kCPU);
  StageRunner runner(stage, true, true, test::square_loss(), false);
  const at::Tensor x = test::values({2, kWidth}, 1);
  const StepContext context;
  EXPECT_THROW(runner.forward(0, context, Tree::tuple({x}), {}, x), StateError);  // no step has begun
  StagePlan plan;
  plan.meta.inputs = plan.meta.outputs = TensorMetas{meta_of(x)};
  plan.main_inputs = plan.main_outputs = 1;
  runner.begin_step(true, {&plan});
  EXPECT_THROW(runner.forward(1, context, Tree::tuple({x}), {}, x), StateError);  // outside of the step
  EXPECT_THROW(runner.forward(-1, context, Tree::tuple({x}), {}, x), StateError);
  EXPECT_THROW(runner.backward(0, context), StateError);  // before its forward
  runner.forward(0, context, Tree::tuple({x}), {}, x);
  EXPECT_THROW(runner.forward(0, context, Tree::tuple({x}), {}, x), StateError);  // twice
  EXPECT_THROW(runner.backward_weight(0, context), StateError);                   // before its other half
  runner.backward_input(0, context);
  runner.backward_weight(0, context);
  EXPECT_THROW(runner.backward_weight(0, context), StateError);  // twice
  EXPECT_EQ(runner.live(), 0);
}

TEST(Stage, ValidationInFull) {
  comm::run_ranks(2, 20s, [](comm::World& world) {
    StageOptions options;
    options.validate = true;
    const PipelineStage stage(StageModule(Block(world.rank())), world.rank(), 2, at::kCPU, options);
    Schedule1F1B pipeline(stage, 4, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 9);
    pipeline.step(batch.args, {}, batch.target);
    pipeline.eval(batch.args);
  });
}

// Two stages whose examples do not match what is sent. `where`: the stage that validates; -1: none. Returns
// the error of that stage, or of any; "" if the step succeeded.
std::string validation_error(int where, const StageOptions& first, const StageOptions& second,
                             const std::function<at::Tensor(at::Tensor)>& between) {
  std::string said;
  std::mutex mutex;
  try {
    comm::run_ranks(2, 20s, [&](comm::World& world) {
      Block block(world.rank());
      StageOptions options = world.rank() == 0 ? first : second;
      options.validate = world.rank() == where;
      const bool begins = world.rank() == 0;
      const StageModule module(
          [block, begins, between](at::Tensor x) mutable {
            return begins ? between(block->forward(x)) : block->forward(x);
          },
          {block.ptr()});
      Schedule1F1B pipeline(PipelineStage(module, world.rank(), 2, at::kCPU, options), 4, test::square_loss(),
                            {world});
      const test::Batch batch = test::plain_batch(0, 8);
      try {
        pipeline.step(batch.args, {}, batch.target);
      } catch (const PipeliningMetadataError& error) {
        const std::lock_guard lock(mutex);
        said = std::to_string(world.rank()) + ": " + error.what();
        throw;
      }
    });
  } catch (const std::exception&) {
    // Recorded where it happened.
  }
  return said;
}

TEST(Stage, ValidationComparesLayouts) {
  const at::Tensor plain = at::empty({2, kWidth}).requires_grad_();
  const at::Tensor turned = at::empty({kWidth, 2}).t().requires_grad_();
  const auto turn = [](const at::Tensor& x) { return x.t().contiguous().t(); };
  StageOptions rows;
  rows.input_args = rows.output_args = {plain};
  const auto as_is = [](const at::Tensor& x) { return x; };
  EXPECT_EQ(validation_error(0, rows, rows, as_is), "");
  EXPECT_EQ(validation_error(1, rows, rows, as_is), "");
  // The examples say rows, the first stage makes columns. Without validation the tensor is sent as agreed.
  EXPECT_EQ(validation_error(-1, rows, rows, turn), "");
  EXPECT_TRUE(has_text(validation_error(0, rows, rows, turn),
                       "0: stage 0 outputs, microbatch 0[0]: stride: got [1, 2], expected [6, 1]"));
  EXPECT_TRUE(
      has_text(validation_error(1, rows, rows, turn),
               "1: input 0 of stage 1, microbatch 0, as it was received: got float32[2, 6] stride [1, 2]"));
  // Gradients: the examples say columns, autograd makes rows.
  StageOptions columns = rows;
  columns.input_grads = {turned.detach()};
  EXPECT_EQ(validation_error(-1, rows, columns, as_is), "");
  EXPECT_TRUE(has_text(validation_error(1, rows, columns, as_is),
                       "1: gradient of input 0 of stage 1, microbatch 0: got float32[2, 6], expected "
                       "float32[2, 6] stride [1, 2]"));
  EXPECT_TRUE(has_text(validation_error(0, rows, columns, as_is),
                       "0: gradient of output 0 of stage 0, microbatch 0, as it was received: got float32[2, "
                       "6], expected float32[2, 6] stride [1, 2]"));
}

TEST(Stage, GradientsOfAnotherDtypeAreRefusedWithoutValidation) {
  StageOptions rows, doubles;
  rows.input_args = rows.output_args = {at::empty({2, kWidth}).requires_grad_()};
  doubles = rows;
  doubles.input_grads = {at::empty({2, kWidth}, at::kDouble)};
  EXPECT_TRUE(
      has_text(validation_error(-1, rows, doubles, [](const at::Tensor& x) { return x; }),
               "1: gradient of input 0 of stage 1, microbatch 0: got float32[2, 6], expected float64[2, 6]"));
}

TEST(Stage, ExamplesOfOutputGradientsAreCompared) {
  StageOptions rows, other;
  rows.input_args = rows.output_args = {at::empty({2, kWidth}).requires_grad_()};
  const auto as_is = [](const at::Tensor& x) { return x; };
  other = rows;
  other.output_grads = {at::empty({2, kWidth})};
  EXPECT_EQ(validation_error(-1, other, rows, as_is), "");
  const std::string where = "0: example gradients of the outputs of stage 0 and what is sent back to it[0]: ";
  other.output_grads = {at::empty({3, kWidth})};
  EXPECT_TRUE(
      has_text(validation_error(-1, other, rows, as_is), where + "shape: got [2, 6], expected [3, 6]"));
  other.output_grads = {at::empty({2, kWidth}, at::kDouble)};
  EXPECT_TRUE(
      has_text(validation_error(-1, other, rows, as_is), where + "dtype: got float32, expected float64"));
  // If a trial runs, its result is used, and a warning is issued.
  const WarningCapture capture;
  StageOptions none;
  EXPECT_EQ(validation_error(-1, other, none, as_is), "");
  ASSERT_EQ(capture.warnings().size(), 1U);
  EXPECT_TRUE(has_text(capture.warnings()[0].message, "example gradients of the outputs of stage 0"));
}

}  // namespace stage_test
}  // namespace penstock
