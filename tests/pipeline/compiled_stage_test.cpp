// Stages that run as captured graphs: values of the running step, what is refused, and what is captured
// again.
#include "penstock/compiled_stage.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "penstock/deferred_linear.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/microbatch.h"
#include "penstock/mode.h"
#include "penstock/pipeline/compiled/prepare_stage.h"
#include "penstock/random.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/constant_tensor.h"
#include "penstock/torch/random/running_step.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"
#include "tests/throws.h"

namespace penstock {
namespace compiled_stage_test {

using namespace test;

StepContext step_of(std::int64_t step, std::int64_t microbatch, double loss_scale = 1) {
  StepContext context;
  context.seed = 7;
  context.step = step;
  context.microbatch = microbatch;
  context.microbatches = 4;
  context.loss_scale = loss_scale;
  return context;
}

struct Counted {
  std::vector<StageCapture> captures;
  CompiledStageOptions options() {
    CompiledStageOptions options;
    options.captured = [this](const StageCapture& capture) { captures.push_back(capture); };
    return options;
  }
};

Tree args_of(const at::Tensor& x) { return Tree::tuple({x}); }

// Output and gradients of one microbatch.
std::vector<at::Tensor> run(const StageModule& stage, const StepContext& step, const at::Tensor& input,
                            bool backward_elsewhere = false) {
  for (at::Tensor parameter : stage.parameters()) parameter.mutable_grad() = at::Tensor();
  const at::Tensor x = input.detach().clone().requires_grad_();
  at::Tensor out;
  {
    const StepGuard guard(step);
    out = stage.forward(args_of(x), Tree()).tensor();
    if (!backward_elsewhere) out.pow(2).sum().backward();
  }
  if (backward_elsewhere) {
    const StepGuard other(step_of(99, 0));
    out.pow(2).sum().backward();
  }
  std::vector<at::Tensor> all{out.detach(), x.grad()};
  for (const at::Tensor& parameter : stage.parameters()) all.push_back(parameter.grad().clone());
  return all;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

template <class Function>
StageModule linear_with(Function function) {
  torch::manual_seed(3);
  torch::nn::Linear linear(8, 8);
  return StageModule([linear, function](at::Tensor x) mutable { return function(linear->forward(x)); },
                     {linear.ptr()});
}

at::Tensor dropped(const at::Tensor& x) {
  const auto step = StepContext::current();
  return keyed_dropout(x, 0.5, step->key(4, purpose::kDropout), step->box_of(x.sizes()));
}

TEST(CompiledStage, DrawsTheRandomNumbersOfEachStepAndMicrobatch) {
  const StageModule plain = linear_with(dropped);
  Counted counted;
  const StageModule fast = compiled_stage(linear_with(dropped), counted.options());
  const at::Tensor x = torch::randn({6, 8});
  at::Tensor first;
  for (std::int64_t step = 0; step < 3; ++step)
    for (std::int64_t microbatch = 0; microbatch < 4; ++microbatch) {
      const auto expected = run(plain, step_of(step, microbatch), x);
      expect_equal(run(fast, step_of(step, microbatch), x), expected);
      if (first.defined()) {
        EXPECT_FALSE(at::equal(expected[0], first));
      }
      first = expected[0];
    }
  EXPECT_EQ(counted.captures.size(), 1u);
}

// Backward draws the mask again: of its own forward, whatever step is running.
TEST(CompiledStage, RunsBackwardInTheStepOfItsForward) {
  const StageModule plain = linear_with(dropped), fast = compiled_stage(linear_with(dropped));
  const at::Tensor x = torch::randn({6, 8});
  for (const std::int64_t step : {1, 2})
    expect_equal(run(fast, step_of(step, 1), x, true), run(plain, step_of(step, 1), x, true));
}

// The output of one microbatch, the gradient of its input, and what that depends on: of a stage that may be
// gone before backward runs.
std::vector<at::Tensor> derivatives_of(StageModule stage, const StepContext& step, const at::Tensor& input,
                                       bool gone = false) {
  const at::Tensor x = input.detach().clone().requires_grad_();
  at::Tensor out;
  {
    const StepGuard guard(step);
    out = stage.forward(args_of(x), Tree()).tensor();
  }
  if (gone) stage = StageModule([](at::Tensor y) { return y; }, StageModule::Modules{});
  const StepGuard other(step_of(99, 0));
  const at::Tensor slope =
      torch::autograd::grad({out.pow(2).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  return {out.detach(), slope.detach(), torch::autograd::grad({slope.pow(2).sum()}, {x})[0]};
}

// The module runs again, with the mask of its forward.
TEST(CompiledStage, IsDifferentiatedTwice) {
  const auto function = [](const at::Tensor& x) { return dropped(x.tanh()); };
  const StageModule plain = linear_with(function);
  Counted counted;
  const StageModule fast = compiled_stage(linear_with(function), counted.options());
  const at::Tensor x = torch::randn({6, 8});
  for (std::int64_t step = 0; step < 2; ++step)
    for (const bool gone : {false, true}) {
      SCOPED_TRACE(gone);
      const auto expected = derivatives_of(plain, step_of(step, 1), x);
      const auto actual =
          derivatives_of(gone ? compiled_stage(linear_with(function)) : fast, step_of(step, 1), x, gone);
      for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-4, 1e-5)) << i;
    }
  EXPECT_EQ(counted.captures.size(), 1u);
}

TEST(CompiledStage, IsDifferentiatedTwiceWithTheFlagsOfItsForward) {
  torch::nn::Linear linear(8, 8);
  const StageModule fast = compiled_stage(StageModule(linear));
  const at::Tensor x = torch::randn({6, 8}).requires_grad_();
  const StepGuard guard(step_of(1, 0));
  const at::Tensor out = fast.forward(args_of(x), Tree()).tensor().pow(2).sum();
  linear->eval();
  EXPECT_TRUE(has_text(
      message_of<StateError>([&] { torch::autograd::grad({out}, {x}, {}, true, /*create_graph=*/true); }),
      "a training flag of a module was changed"));
}

TEST(CompiledStage, HasTheLossScaleOfEachStep) {
  const auto scaled = [](const at::Tensor& x) { return x * scale_of_running_step(x, 0.5); };
  const StageModule plain = linear_with(scaled), fast = compiled_stage(linear_with(scaled));
  const at::Tensor x = torch::randn({6, 8});
  for (const double scale : {1.0, 1024.0, 512.0})
    expect_equal(run(fast, step_of(1, 0, scale), x), run(plain, step_of(1, 0, scale), x));
}

TEST(CompiledStage, RefusesNumbersOfTheStep) {
  struct Forbidden {
    const char* name;
    at::Tensor (*use)(const at::Tensor& x);
  };
  const std::vector<Forbidden> all{
      {"step", [](const at::Tensor& x) { return x * static_cast<double>(StepContext::current()->step); }},
      {"microbatch",
       [](const at::Tensor& x) { return x + static_cast<double>(*StepContext::current()->microbatch); }},
      {"seed", [](const at::Tensor& x) { return x + static_cast<double>(StepContext::current()->seed); }},
      {"loss scale", [](const at::Tensor& x) { return x * StepContext::current()->loss_scale; }},
      {"parity", [](const at::Tensor& x) { return StepContext::current()->step % 2 == 0 ? x.tanh() : x; }},
      {"warm-up", [](const at::Tensor& x) { return StepContext::current()->step < 1000 ? x.tanh() : x; }},
      {"values",
       [](const at::Tensor& x) { return x + torch::full({8}, double(StepContext::current()->step)); }}};
  for (const Forbidden& each : all) {
    SCOPED_TRACE(each.name);
    const StageModule fast = compiled_stage(linear_with(each.use));
    const std::string text = message_of<StateError>([&] { run(fast, step_of(4, 1), torch::randn({6, 8})); });
    EXPECT_TRUE(has_text(text, "a value of the running step"));
    EXPECT_TRUE(has_text(text, "aten::"));
    EXPECT_TRUE(has_text(text, "StepContext::key()"));
  }
}

TEST(CompiledStage, NamesControlFlowThatDependsOnValues) {
  const StageModule fast = compiled_stage(
      linear_with([](const at::Tensor& x) { return x.sum().item<float>() > 0 ? x.relu() : x.tanh(); }));
  const std::string text = message_of<DataDependentError>([&] {
    run(fast, step_of(4, 1), torch::randn({6, 8}));
  });
  EXPECT_TRUE(has_text(text, "aten::_local_scalar_dense"));
}

TEST(CompiledStage, SaysWhyItCapturesAgainAndHowOftenItMay) {
  Counted counted;
  CompiledStageOptions options = counted.options();
  options.max_graphs = 2;
  const StageModule fast = compiled_stage(linear_with(dropped), options);
  run(fast, step_of(1, 0), torch::randn({6, 8}));
  run(fast, step_of(1, 1), torch::randn({5, 8}));
  run(fast, step_of(1, 2), torch::randn({6, 8}));
  ASSERT_EQ(counted.captures.size(), 2u);
  EXPECT_EQ(counted.captures[0].reason, "");
  EXPECT_EQ(counted.captures[0].graph, 1u);
  EXPECT_EQ(counted.captures[1].graph, 2u);
  EXPECT_TRUE(has_text(counted.captures[1].reason, "args[0] has sizes [5, 8], in the capture [6, 8]"));
  const std::string text = message_of<StateError>([&] { run(fast, step_of(1, 3), torch::randn({4, 8})); });
  EXPECT_TRUE(has_text(text, "captured 3 times"));
  EXPECT_TRUE(has_text(text, "args[0] has sizes [4, 8]"));
}

struct WithHeadImpl : torch::nn::Module {
  WithHeadImpl() { head = register_module("head", torch::nn::Linear(8, 8)); }
  at::Tensor forward(at::Tensor x) { return head->forward(x).tanh(); }
  torch::nn::Linear head{nullptr};
};

TEST(CompiledStage, IsCapturedAgainWithAModuleThatWasReplaced) {
  torch::manual_seed(3);
  const auto module = std::make_shared<WithHeadImpl>();
  Counted counted;
  const StageModule plain(module), fast = compiled_stage(StageModule(module), counted.options());
  const at::Tensor x = torch::randn({6, 8});
  for (std::int64_t step = 0; step < 3; ++step) {
    SCOPED_TRACE(step);
    for (std::int64_t microbatch = 0; microbatch < 2; ++microbatch)
      expect_equal(run(fast, step_of(step, microbatch), x), run(plain, step_of(step, microbatch), x));
    ASSERT_EQ(counted.captures.size(), static_cast<std::size_t>(step) + 1);
    EXPECT_EQ(has_text(counted.captures.back().reason, "was replaced"), step > 0);
    module->head = module->replace_module("head", torch::nn::Linear(8, 8));
  }
}

TEST(CompiledStage, TakesDynamicDimsByTheNamesOfArguments) {
  const StageModule plain = linear_with(dropped);
  Counted counted;
  CompiledStageOptions options = counted.options();
  options.compile.dynamic.dims = {{"args[0]", 0, "B"}};
  const StageModule fast = compiled_stage(linear_with(dropped), options);
  for (const std::int64_t rows : {6, 3, 9}) {
    const at::Tensor x = torch::randn({rows, 8});
    expect_equal(run(fast, step_of(rows, 1), x), run(plain, step_of(rows, 1), x));
  }
  EXPECT_EQ(counted.captures.size(), 1u);
}

// The queue of the running microbatch gets nothing: the graph computes the gradients of the weights.
TEST(CompiledStage, HasTheWeightGradientsOfDeferredLayers) {
  const auto make = [] {
    torch::manual_seed(3);
    torch::nn::Sequential net(DeferredLinear(8, 16), torch::nn::ReLU(), DeferredLinear(16, 4));
    return StageModule([net](at::Tensor x) mutable { return net->forward(x); }, {net.ptr()});
  };
  const auto gradients_of = [](const StageModule& stage, const at::Tensor& x) {
    for (std::int64_t microbatch = 0; microbatch < 3; ++microbatch) {
      WeightQueue queue;
      at::Tensor out;
      {
        const StepGuard step(step_of(0, microbatch));
        const WeightQueueGuard deferring(queue);
        out = stage.forward(args_of(x), Tree()).tensor();
      }
      out.pow(2).sum().backward();
      queue.run();
    }
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : stage.parameters()) gradients.push_back(parameter.grad());
    if (x.requires_grad()) gradients.push_back(x.grad());
    return gradients;
  };
  for (const bool of_input : {false, true}) {
    SCOPED_TRACE(of_input);
    const at::Tensor x = torch::randn({6, 8}), same = x.clone();
    for (const at::Tensor& each : {x, same}) each.set_requires_grad(of_input);
    const auto actual = gradients_of(compiled_stage(make()), x), expected = gradients_of(make(), same);
    for (const at::Tensor& gradient : actual) ASSERT_TRUE(gradient.defined());
    expect_equal(actual, expected);
  }
}

// Rows of data-parallel ranks are part of the keys' boxes, which a graph holds.
TEST(CompiledStage, CapturesAgainForOtherRows) {
  const StageModule plain = linear_with(dropped);
  Counted counted;
  const StageModule fast = compiled_stage(linear_with(dropped), counted.options());
  const at::Tensor x = torch::randn({4, 8});
  for (const std::int64_t first : {0, 4, 0}) {
    StepContext step = step_of(2, 1);
    step.rows = BatchRows{.global = 8, .first = first, .count = 4};
    expect_equal(run(fast, step, x), run(plain, step, x));
  }
  ASSERT_EQ(counted.captures.size(), 2u);
  EXPECT_TRUE(has_text(counted.captures[1].reason, "rows 4 from 4 of 8"));
}

// Microbatches are views of a batch at different offsets.
TEST(CompiledStage, CapturesOnceForMicrobatchesOfABatch) {
  torch::manual_seed(3);
  torch::nn::Embedding embed(10, 8);
  Counted counted;
  const StageModule fast = compiled_stage(
      StageModule([embed](at::Tensor tokens) mutable { return embed->forward(tokens); }, {embed.ptr()}),
      counted.options());
  const at::Tensor batch = torch::randint(10, {8, 3});
  for (std::int64_t microbatch = 0; microbatch < 4; ++microbatch) {
    const StepGuard guard(step_of(0, microbatch));
    const at::Tensor tokens = batch.narrow(0, 2 * microbatch, 2);
    EXPECT_TRUE(at::equal(fast.forward(args_of(tokens), Tree()).tensor(), embed->forward(tokens)));
  }
  EXPECT_EQ(counted.captures.size(), 1u);
}

// A tensor in a member is made fake by the capture, unless it is declared.
struct KeepsSumImpl : torch::nn::Module {
  KeepsSumImpl() { linear = register_module("linear", torch::nn::Linear(8, 8)); }
  at::Tensor forward(at::Tensor x) {
    x = linear->forward(x);
    sum = x.detach().sum();
    return x;
  }
  torch::nn::Linear linear{nullptr};
  at::Tensor sum;
};

TEST(CompiledStage, DeliversTheValuesThatForwardLeaves) {
  const auto module = std::make_shared<KeepsSumImpl>();
  CompiledStageOptions options;
  options.values_left = [&] { return Tree(module->sum); };
  options.set_values_left = [&](const Tree& values) { module->sum = values.tensor(); };
  const StageModule fast = compiled_stage(StageModule(module), options);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = torch::randn({6, 8});
    run(fast, step_of(step, 0), x);
    EXPECT_TRUE(at::equal(module->sum, module->linear->forward(x).sum()));
  }
}

TEST(CompiledStage, AnUndeclaredValueHasNoNumbersAndSaysWhy) {
  const auto module = std::make_shared<KeepsSumImpl>();
  const StageModule fast = compiled_stage(StageModule(module));
  run(fast, step_of(1, 0), torch::randn({6, 8}));
  const std::string text = message_of<StateError>([&] { (module->sum + 1).item<float>(); });
  EXPECT_TRUE(has_text(text, "kept it from the capture of its stage as a graph"));
}

TEST(CompiledStage, RefusesWritesIntoAViewOfABatch) {
  const StageModule fast =
      compiled_stage(StageModule([](at::Tensor x) { return x.add_(1) * 2; }, StageModule::Modules{}));
  const at::Tensor batch = torch::zeros({4, 2});
  const StepGuard guard(step_of(0, 1));
  EXPECT_TRUE(
      has_text(message_of<NotImplemented>([&] { fast.forward(args_of(batch.narrow(0, 2, 2)), Tree()); }),
               "writes args[0]"));
}

// Each microbatch is a view of the batch, the first one at offset 0.
TEST(CompiledStage, RefusesWritesIntoEveryMicrobatch) {
  const StageModule fast =
      compiled_stage(StageModule([](at::Tensor x) { return x.clamp_max_(0.5) * 2; }, StageModule::Modules{}));
  const at::Tensor batch = torch::ones({8, 2});
  const Microbatches parts = split_microbatches(Tree::tuple({batch}), {}, 4);
  for (std::size_t i = 0; i < parts.count(); ++i) {
    SCOPED_TRACE(i);
    const StepGuard guard(step_of(0, static_cast<std::int64_t>(i)));
    EXPECT_TRUE(
        has_text(message_of<NotImplemented>([&] { fast.forward(parts.args[i], Tree()); }), "writes args[0]"));
  }
  EXPECT_TRUE(at::equal(batch, torch::ones({8, 2})));
}

// The first argument is the whole tensor, so it alone could be written; the second one would not see that.
TEST(CompiledStage, RefusesWritesIntoArgumentsThatShareMemory) {
  const StageModule fast = compiled_stage(
      StageModule([](at::Tensor x, at::Tensor y) { return x.add_(1) * y; }, StageModule::Modules{}));
  const at::Tensor x = torch::zeros({4, 2});
  const StepGuard guard(step_of(0, 0));
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] {
                         fast.forward(Tree::tuple({x, x}), Tree());
                       }),
                       "writes args[0]"));
}

// A graph that was captured for a tensor with memory of its own, which may be written, is not run for a view.
TEST(CompiledStage, RefusesWritesIntoViewsWithAnEarlierGraph) {
  Counted counted;
  const StageModule fast =
      compiled_stage(StageModule([](at::Tensor x) { return x.clamp_max_(0.5) * 2; }, StageModule::Modules{}),
                     counted.options());
  const at::Tensor own = torch::ones({2, 2}), batch = torch::ones({4, 2});
  const StepGuard guard(step_of(0, 1));
  EXPECT_TRUE(at::equal(fast.forward(args_of(own), Tree()).tensor(), torch::ones({2, 2})));
  EXPECT_TRUE(at::equal(own, torch::full({2, 2}, 0.5)));
  EXPECT_TRUE(
      has_text(message_of<NotImplemented>([&] { fast.forward(args_of(batch.narrow(0, 2, 2)), Tree()); }),
               "writes args[0]"));
  EXPECT_TRUE(at::equal(batch, torch::ones({4, 2})));
  EXPECT_EQ(counted.captures.size(), 1u);
}

TEST(CompiledStage, NeedsBothCallbacksForValues) {
  CompiledStageOptions options;
  options.values_left = [] { return Tree(); };
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { compiled_stage(linear_with(dropped), options); }),
                       "give both or neither"));
}

// A mode sees what the module does, not a replay.
TEST(CompiledStage, RunsTheModuleUnderAMode) {
  struct Watch final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      ++operators;
      op.callBoxed(stack);
    }
    int operators = 0;
  };
  Counted counted;
  const StageModule fast = compiled_stage(linear_with(dropped), counted.options());
  const at::Tensor x = torch::randn({6, 8});
  const auto expected = run(linear_with(dropped), step_of(2, 1), x);
  Watch watch;
  {
    const ModeGuard guard(watch);
    expect_equal(run(fast, step_of(2, 1), x), expected);
  }
  EXPECT_GT(watch.operators, 3);
  EXPECT_TRUE(counted.captures.empty());
  expect_equal(run(fast, step_of(2, 1), x), expected);
  EXPECT_EQ(counted.captures.size(), 1u);
}

// ---- graphs that are kept between runs ----

class CacheFolder : public test::TemporaryFolder {
 public:
  CompiledStageOptions options(Counted& counted) const {
    CompiledStageOptions options = counted.options();
    options.compile.cache = {
        .use = graph::CacheOptions::Use::On, .folder = path.string(), .identity = "a stage", .name = "stage"};
    return options;
  }
};

TEST(KeptStages, AreLoadedWithTheSameBits) {
  const CacheFolder folder;
  const StageModule plain = linear_with(dropped);
  double made_in_seconds = 0;
  for (const bool cold : {true, false}) {
    Counted counted;
    int forwards = 0;
    const StageModule fast = compiled_stage(linear_with([&](const at::Tensor& x) {
                                              ++forwards;
                                              return dropped(x);
                                            }),
                                            folder.options(counted));
    for (std::int64_t step = 0; step < 3; ++step) {
      const at::Tensor x = torch::randn({6, 8});
      expect_equal(run(fast, step_of(step, 1, 4.0), x), run(plain, step_of(step, 1, 4.0), x));
    }
    ASSERT_EQ(counted.captures.size(), 1u);
    EXPECT_EQ(counted.captures[0].source, cold ? GraphSource::Captured : GraphSource::Cache);
    EXPECT_EQ(forwards > 0, cold);
    if (cold) made_in_seconds = counted.captures[0].made_in_seconds;
    EXPECT_EQ(counted.captures[0].made_in_seconds, made_in_seconds);
    EXPECT_GT(made_in_seconds, 0);
  }
}

// Training flags and what forward leaves belong to what is kept.
TEST(KeptStages, RestoreValuesLeftAndTellModesApart) {
  const CacheFolder folder;
  for (const bool cold : {true, false}) {
    Counted counted;
    const auto module = std::make_shared<KeepsSumImpl>();
    CompiledStageOptions options = folder.options(counted);
    options.values_left = [&] { return Tree(module->sum); };
    options.set_values_left = [&](const Tree& values) { module->sum = values.tensor(); };
    const StageModule fast = compiled_stage(StageModule(module), options);
    for (const bool training : {true, false}) {
      module->train(training);
      const at::Tensor x = torch::randn({6, 8});
      run(fast, step_of(1, 0), x);
      EXPECT_TRUE(at::equal(module->sum, module->linear->forward(x).sum()));
    }
    ASSERT_EQ(counted.captures.size(), 2u);
    for (const StageCapture& capture : counted.captures)
      EXPECT_EQ(capture.source, cold ? GraphSource::Captured : GraphSource::Cache);
  }
}

TEST(KeptStages, AreNotKeptIfTheyAreRefused) {
  const CacheFolder folder;
  for (int start = 0; start < 2; ++start) {
    Counted counted;
    const StageModule fast = compiled_stage(linear_with([](const at::Tensor& x) {
                                              return x * static_cast<double>(StepContext::current()->step);
                                            }),
                                            folder.options(counted));
    EXPECT_TRUE(has_text(message_of<StateError>([&] {
                           run(fast, step_of(4, 1), torch::randn({6, 8}));
                         }),
                         "a value of the running step"));
    EXPECT_TRUE(counted.captures.empty());
  }
}

// The stored graph writes its argument, which was no view in the run that stored it.
TEST(KeptStages, RefuseWritesIntoViews) {
  const CacheFolder folder;
  const at::Tensor batch = torch::ones({4, 2});
  for (const bool cold : {true, false}) {
    Counted counted;
    const StageModule fast = compiled_stage(
        StageModule([](at::Tensor x) { return x.clamp_max_(0.5) * 2; }, StageModule::Modules{}),
        folder.options(counted));
    const StepGuard guard(step_of(0, 0));
    if (cold) {
      fast.forward(args_of(torch::ones({2, 2})), Tree());
      EXPECT_EQ(counted.captures.size(), 1u);
    } else {
      EXPECT_TRUE(
          has_text(message_of<NotImplemented>([&] { fast.forward(args_of(batch.narrow(0, 0, 2)), Tree()); }),
                   "writes args[0]"));
    }
  }
  EXPECT_TRUE(at::equal(batch, torch::ones({4, 2})));
}

TEST(KeptStages, ArePreparedWithoutARun) {
  const CacheFolder folder;
  Counted before, after;
  const at::Tensor x = torch::randn({6, 8});
  {
    const PreparableStage stage = preparable_stage(linear_with(dropped), folder.options(before));
    const StepGuard guard(step_of(7, 2));
    stage.prepare(args_of(torch::empty({6, 8}).requires_grad_()), Tree());
    ASSERT_EQ(before.captures.size(), 1u);
    EXPECT_EQ(before.captures[0].source, GraphSource::Captured);
  }
  const StageModule fast = compiled_stage(linear_with(dropped), folder.options(after));
  expect_equal(run(fast, step_of(1, 1), x), run(linear_with(dropped), step_of(1, 1), x));
  ASSERT_EQ(after.captures.size(), 1u);
  EXPECT_EQ(after.captures[0].source, GraphSource::Cache);
}

// A table that never changes is stored with its values; another tensor of the program may change.
TEST(KeptStages, HoldConstantTables) {
  const at::Tensor table = constant_tensor(torch::randn({8})), other = torch::randn({8});
  const auto source_of_second = [](const at::Tensor& used) {
    const CacheFolder folder;
    Counted counted;
    const at::Tensor x = torch::randn({6, 8});
    const auto by_table = [&](const at::Tensor& y) { return y * used.narrow(0, 0, 8); };
    for (int start = 0; start < 2; ++start)
      expect_equal(run(compiled_stage(linear_with(by_table), folder.options(counted)), step_of(1, 1), x),
                   run(linear_with(by_table), step_of(1, 1), x));
    return counted.captures.at(1).source;
  };
  EXPECT_EQ(source_of_second(table), GraphSource::Cache);
  EXPECT_EQ(source_of_second(other), GraphSource::Captured);
  EXPECT_TRUE(is_constant_tensor(table.view({2, 4}).detach()));
  table.add_(1);  // no constant any more
  EXPECT_FALSE(is_constant_tensor(table));
  EXPECT_FALSE(is_constant_tensor(other));
  EXPECT_FALSE(is_constant_tensor(at::Tensor()));
}

// A stage that says that it does not depend on its rows is captured for all of them, or refused.
TEST(CompiledStage, IsCheckedAgainstOtherRows) {
  const auto rows_from = [](std::int64_t first) {
    StepContext step = step_of(2, 1);
    step.rows = BatchRows{.global = 8, .first = first, .count = 4};
    return step;
  };
  const auto plain = [](const at::Tensor& x) { return x.tanh(); };
  Counted counted;
  CompiledStageOptions options = counted.options();
  options.uses_rows = false;
  const StageModule fast = compiled_stage(linear_with(plain), options);
  const at::Tensor x = torch::randn({4, 8});
  for (const std::int64_t first : {0, 4})
    expect_equal(run(fast, rows_from(first), x), run(linear_with(plain), rows_from(first), x));
  EXPECT_EQ(counted.captures.size(), 1u);
  for (const std::int64_t first : {0, 4}) {
    const StageModule wrong = compiled_stage(linear_with(dropped), options);
    EXPECT_TRUE(has_text(message_of<StateError>([&] { run(wrong, rows_from(first), x); }), "uses_rows"));
  }
}

}  // namespace compiled_stage_test
}  // namespace penstock
