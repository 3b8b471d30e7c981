// Stages of traced pipelines, run one after the other, equal the module itself in every step, mode and
// example, or say why not: random numbers of replicas and microbatches, values of the step, borders in
// evaluation, results and backwards that differ between examples, keyword arguments, frozen modules,
// autocast, modules of a Sequential, operators of one device.
#include <gtest/gtest.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "penstock/dropout.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/trace_pipeline.h"
#include "tests/has_text.h"
#include "tests/pipeline/traced_models.h"
#include "tests/throws.h"

namespace penstock {
namespace traced_stages_test {

using test::has_text;
using test::linear;
using test::message_of;
using test::Stages;
using test::values;
using Names = std::vector<std::string>;

StepContext step_of(std::int64_t microbatch, std::optional<BatchRows> rows = {}) {
  StepContext step;
  step.seed = 42;
  step.step = 7;
  step.microbatch = microbatch;
  step.microbatches = 4;
  step.rows = rows;
  return step;
}

// -------------------------------------------------------------------------------------------------------
// the running step

TEST(TracedRows, ReplicasDropTheirOwnElements) {
  torch::nn::Sequential net(linear(0), KeyedDropout(KeyedDropoutOptions(0.5, "d")), linear(1));
  const at::Tensor x = values({4, 4}, 1);
  const Stages stages(trace_pipeline(net, Tree::tuple({x}), {}, PipeSplit::into(2)));
  std::vector<at::Tensor> seen;
  for (const std::optional<BatchRows>& rows : std::vector<std::optional<BatchRows>>{
           {}, BatchRows{4, 0, 4}, BatchRows{8, 0, 4}, BatchRows{8, 4, 4}, BatchRows{8, 2, 2}}) {
    const StepGuard step(step_of(0, rows));
    const at::Tensor expected = net->forward(x);
    EXPECT_TRUE(stages(x).equal(expected)) << (rows ? rows->first : -1);
    seen.push_back(expected);
  }
  EXPECT_TRUE(seen[0].equal(seen[1]));
  EXPECT_FALSE(seen[2].equal(seen[3])) << "the test would not notice";
  // Two rows of the tensor for one of the microbatch are fine, three for two are not.
  const StepGuard step(step_of(0, BatchRows{9, 3, 3}));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { stages(x); }), "a multiple of the 3 rows here"));
}

// Also if the trace is made within a step of one replica.
TEST(TracedRows, ATraceOfOneReplicaServesAll) {
  torch::nn::Sequential net(linear(0), KeyedDropout(KeyedDropoutOptions(0.5, "d")));
  const at::Tensor x = values({4, 4}, 1);
  std::optional<Stages> stages;
  {
    const StepGuard step(step_of(3, BatchRows{16, 8, 4}));
    stages.emplace(trace_pipeline(net, Tree::tuple({x}), {}, PipeSplit::into(1)));
  }
  const StepGuard step(step_of(1, BatchRows{8, 4, 4}));
  EXPECT_TRUE((*stages)(x).equal(net->forward(x)));
}

// A box that the forward moves.
TEST(TracedRows, BoxesThatTheForwardMoves) {
  const StageModule model(
      [](at::Tensor x) {
        const auto step = StepContext::current();
        GlobalBox box = step->box_of(x.sizes());
        if (box.whole()) box = {x.sizes().vec(), {0, 0}};
        box.offset[0] += 2;
        return keyed_dropout(x.narrow(0, 2, 2), 0.5, step->key(3, purpose::kDropout), box);
      },
      {});
  const at::Tensor x = values({4, 4}, 1);
  const Stages stages(trace_pipeline(model, Tree::tuple({x}), {}, PipeSplit::into(1)));
  for (const std::optional<BatchRows>& rows :
       std::vector<std::optional<BatchRows>>{{}, BatchRows{8, 4, 4}, BatchRows{8, 2, 2}}) {
    const StepGuard step(step_of(2, rows));
    EXPECT_TRUE(stages(x).equal(model.forward(Tree::tuple({x}), {}).tensor()));
  }
}

using OfStep = std::function<at::Tensor(const at::Tensor&, const StepContext&)>;

struct StepReader : torch::nn::Module {
  explicit StepReader(OfStep function) : compute(std::move(function)) {
    inner = register_module("inner", linear(0));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = inner->forward(x);
    const ModuleScope scope(*inner);
    return compute(y, *StepContext::current());
  }
  OfStep compute;
  torch::nn::Linear inner{nullptr};
};

TEST(TracedSteps, ValuesOfTheStepAreRefused) {
  const std::vector<std::pair<const char*, OfStep>> readers = {
      {"loss scale", [](const at::Tensor& x, const StepContext& step) { return x * step.loss_scale; }},
      {"step",
       [](const at::Tensor& x, const StepContext& step) { return step.step > 1000 ? x.relu() : x.tanh(); }},
      {"parity",
       [](const at::Tensor& x, const StepContext& step) { return step.step % 2 ? x.relu() : x.tanh(); }},
      {"seed",
       [](const at::Tensor& x, const StepContext& step) { return x + static_cast<double>(step.seed); }},
      {"microbatch", [](const at::Tensor& x, const StepContext& step) { return x * *step.microbatch; }},
      {"microbatches", [](const at::Tensor& x, const StepContext& step) { return x / step.microbatches; }},
      {"rows", [](const at::Tensor& x,
                  const StepContext& step) { return step.rows ? x / step.rows->global : x.relu(); }},
      {"tensor", [](const at::Tensor& x, const StepContext& step) {
         return x * torch::tensor({step.loss_scale, 1.0, 2.0, 3.0}, at::kFloat);
       }}};
  for (const auto& [what, compute] : readers) {
    SCOPED_TRACE(what);
    const std::string said = message_of<StateError>([&, function = compute] {
      trace_pipeline(StageModule(std::make_shared<StepReader>(function)), Tree::tuple({values({2, 4}, 1)}),
                     {}, PipeSplit::into(1));
    });
    EXPECT_TRUE(has_text(said, "a value of the running step")) << said;
    EXPECT_TRUE(has_text(said, "in module 'inner'")) << said;
    EXPECT_TRUE(has_text(said, "aten::")) << said;
  }
}

// A number that only backward reads.
struct ScaledGradient : torch::autograd::Function<ScaledGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.sin(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * StepContext::current()->loss_scale};
  }
};

TEST(TracedSteps, ValuesOfTheStepInABackward) {
  const auto reader = std::make_shared<StepReader>(
      [](const at::Tensor& x, const StepContext&) { return ScaledGradient::apply(x); });
  const std::string said = message_of<StateError>([&] {
    trace_pipeline(StageModule(reader), Tree::tuple({values({2, 4}, 1)}), {}, PipeSplit::into(1));
  });
  EXPECT_TRUE(has_text(said, "the backward of a torch::autograd::Function")) << said;
}

TEST(TracedSteps, BackwardDrawsWhatForwardDrew) {
  torch::nn::Sequential net(linear(0), KeyedDropout(KeyedDropoutOptions(0.5, "d")), linear(1));
  const at::Tensor x = values({4, 4}, 1);
  const Stages stages(trace_pipeline(net, Tree::tuple({x}), {}, PipeSplit::into(1)));
  const auto gradient_of = [&](const std::function<at::Tensor()>& forward,
                               std::optional<std::int64_t> later) {
    at::Tensor y;
    {
      const StepGuard step(step_of(0, BatchRows{8, 4, 4}));
      y = forward();
    }
    std::optional<StepGuard> step;
    if (later) step.emplace(step_of(*later));
    return torch::autograd::grad({y.square().sum()}, net->parameters());
  };
  const auto traced = [&] { return stages(x); };
  const auto whole = [&] { return net->forward(x); };
  for (const std::optional<std::int64_t>& later :
       std::vector<std::optional<std::int64_t>>{0, 1, std::nullopt}) {
    const auto actual = gradient_of(traced, later), expected = gradient_of(whole, later);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(actual[i].equal(expected[i])) << i;
  }
}

// -------------------------------------------------------------------------------------------------------
// borders

// No module reports itself, and evaluation has fewer multiplications.
struct Gained : torch::nn::Module {
  Gained() {
    a = register_module("a", linear(0));
    drop = register_module("drop", torch::nn::Dropout(0.5));
    b = register_module("b", linear(1));
    gain = register_parameter("gain", values({4}, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::relu(b->forward(drop->forward(a->forward(x)))) * gain;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  torch::nn::Dropout drop{nullptr};
  at::Tensor gain;
};

TEST(TracedBorders, EvaluationIsCutWhereTrainingIs) {
  const auto net = std::make_shared<Gained>();
  const at::Tensor x = values({2, 4}, 1);
  const Pipe pipe =
      trace_pipeline(StageModule(net), Tree::tuple({x}), {}, PipeSplit::at({{"a", SplitPoint::After}}));
  EXPECT_EQ(pipe.parameter_names(0), (Names{"a.weight", "a.bias"}));
  EXPECT_EQ(pipe.parameter_names(1), (Names{"gain", "b.weight", "b.bias"}));
  EXPECT_TRUE(pipe.ties().empty());
  const Stages stages(pipe);
  stages.train(false);
  net->eval();
  EXPECT_TRUE(stages(x).equal(net->forward(x)));
}

// The parameter that the first stage uses in training is used by the second in evaluation.
struct Moving : torch::nn::Module {
  Moving() {
    a = register_module("a", linear(0));
    b = register_module("b", linear(1));
    gain = register_parameter("gain", values({4}, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = is_training() ? a->forward(x * gain) : a->forward(x);
    h = b->forward(h);
    return is_training() ? h : h * gain;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  at::Tensor gain;
};

TEST(TracedBorders, AParameterOfAnotherStageIsRefused) {
  const auto net = std::make_shared<Moving>();
  const at::Tensor x = values({2, 4}, 1);
  const Pipe pipe = trace_pipeline(StageModule(net), Tree::tuple({x}), {}, PipeSplit::at({{"b"}}));
  EXPECT_EQ(pipe.parameter_names(1), (Names{"b.weight", "b.bias"}));
  const Stages stages(pipe);
  stages.train(false);
  const std::string said = message_of<ValueError>([&] { stages(x); });
  EXPECT_TRUE(has_text(said, "uses 'gain' in stage 1, in the first trace only stage 0 does")) << said;
}

// -------------------------------------------------------------------------------------------------------
// examples

struct OneOrTwo : torch::nn::Module {
  OneOrTwo() {
    a = register_module("a", linear(0));
    b = register_module("b", linear(1));
  }
  Tree forward(const at::Tensor& x, double both) {
    const at::Tensor h = a->forward(x), y = b->forward(h);
    return both > 0 ? Tree::tuple({y, h}) : Tree(y);
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

// The same forward; backward multiplies by a number that the forward was given.
struct GradientFactor : torch::autograd::Function<GradientFactor> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double factor) {
    context->saved_data["factor"] = factor;
    return x * 1.0;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * context->saved_data["factor"].toDouble(), at::Tensor()};
  }
};

struct ScaledBack : torch::nn::Module {
  ScaledBack() {
    a = register_module("a", linear(0));
    b = register_module("b", linear(1));
  }
  at::Tensor forward(const at::Tensor& x, double factor) {
    return GradientFactor::apply(b->forward(a->forward(x)), factor);
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

TEST(TracedExamples, ResultsAndBackwardsThatAStageCannotTellApart) {
  const at::Tensor x = values({2, 4}, 1);
  TraceOptions options;
  options.more = {{Tree::tuple({x, 1.0}), {}}};
  for (const StageModule& model :
       {StageModule(std::make_shared<OneOrTwo>()), StageModule(std::make_shared<ScaledBack>())})
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           trace_pipeline(model, Tree::tuple({x, 0.0}), {}, PipeSplit::at({{"b"}}), options);
                         }),
                         "stage 1 is given tensors of the same sizes in two examples, but computes something "
                         "else"));
}

struct ByKeyword : torch::nn::Module {
  ByKeyword() {
    a = register_module("a", linear(0));
    b = register_module("b", linear(1));
  }
  at::Tensor forward(const at::Tensor& x, const Tree& kwargs) {
    return b->forward(a->forward(x)) * kwargs["by"].number();
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

TEST(TracedKeywords, PlainOnesThatDifferBetweenExamples) {
  const auto net = std::make_shared<ByKeyword>();
  const at::Tensor x = values({2, 4}, 1);
  const Tree by_2 = Tree::dict({{"by", 2.0}}), by_3 = Tree::dict({{"by", 3.0}});
  TraceOptions options;
  options.more = {{Tree::tuple({x}), by_3}};
  const Pipe pipe = trace_pipeline(StageModule(net), Tree::tuple({x}), by_2, PipeSplit::at({{"b"}}), options);
  EXPECT_EQ(pipe.keywords(0), Names{});
  EXPECT_EQ(pipe.keywords(1), Names{"by"});
  const Stages stages(pipe);
  for (const Tree& kwargs : {by_2, by_3}) EXPECT_TRUE(stages(x, kwargs).equal(net->forward(x, kwargs)));
  const Tree between = stages.all[0].forward(Tree::tuple({x}), {});
  const std::string said = message_of<ValueError>([&] { stages.all[1].forward(between, {}); });
  EXPECT_TRUE(has_text(said, "pass the keyword arguments by")) << said;
  EXPECT_TRUE(has_text(said, "stage 1")) << said;
}

struct Masked : torch::nn::Module {
  Masked() {
    a = register_module("a", linear(0));
    b = register_module("b", linear(1));
  }
  at::Tensor forward(const at::Tensor& x, const Tree& kwargs) {
    const at::Tensor h = b->forward(a->forward(x));
    for (std::size_t i = 0; i < kwargs.size(); ++i)
      if (kwargs.keys()[i] == "mask" && kwargs.entries()[i].is_tensor()) return h * kwargs["mask"].tensor();
    return h.tanh();
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

TEST(TracedKeywords, ExamplesWithAndWithoutATensor) {
  const auto net = std::make_shared<Masked>();
  const at::Tensor x = values({2, 4}, 1);
  const Tree with = Tree::dict({{"mask", values({2, 1}, 2)}}), none = Tree::dict({{"mask", Tree()}});
  for (const Tree& without : {none, Tree()})
    for (const bool with_first : {true, false}) {
      TraceOptions options;
      options.more = {{Tree::tuple({x}), with_first ? without : with}};
      const Pipe pipe = trace_pipeline(StageModule(net), Tree::tuple({x}), with_first ? with : without,
                                       PipeSplit::at({{"b"}}), options);
      EXPECT_EQ(pipe.keywords(1), Names{"mask"});
      const Stages stages(pipe);
      for (const Tree& kwargs : {with, none}) EXPECT_TRUE(stages(x, kwargs).equal(net->forward(x, kwargs)));
      // A rank that forgets the mask must not compute without one.
      const Tree between = stages.all[0].forward(Tree::tuple({x}), {});
      const std::string said = message_of<ValueError>([&] { stages.all[1].forward(between, {}); });
      EXPECT_TRUE(has_text(said, "pass the keyword arguments mask")) << said;
    }
}

// -------------------------------------------------------------------------------------------------------
// modes and surroundings

struct Frozen : torch::nn::Module {
  Frozen() {
    a = register_module("a", linear(0));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    b = register_module("b", linear(1));
    const at::NoGradGuard no_grad;
    norm->running_mean.copy_(values({4}, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return b->forward(norm->forward(a->forward(x))); }
  torch::nn::Linear a{nullptr}, b{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST(TracedModes, AFrozenModuleIsTracedFrozen) {
  const auto net = std::make_shared<Frozen>();
  net->norm->eval();
  const at::Tensor x = values({6, 4}, 1);
  const Stages stages(trace_pipeline(StageModule(net), Tree::tuple({x}), {}, PipeSplit::at({{"b"}})));
  EXPECT_TRUE(stages(x).equal(net->forward(x)));
  stages.train(false);
  net->eval();
  EXPECT_TRUE(stages(x).equal(net->forward(x)));
  stages.train(true);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { stages(x); }), "a mode that was not traced"));
  stages.all[0].modules()[0]->named_modules()["norm"]->eval();
  net->train();
  net->norm->eval();
  EXPECT_TRUE(stages(x).equal(net->forward(x)));
}

TEST(TracedModes, SeveralRootsInEvaluation) {
  torch::nn::Linear a = linear(0), b = linear(1);
  torch::nn::Dropout drop(0.5);
  const StageModule model(
      [a, b, drop](at::Tensor x) mutable { return b->forward(drop->forward(a->forward(x))); },
      {a.ptr(), drop.ptr(), b.ptr()});
  const at::Tensor x = values({6, 4}, 1);
  const Stages stages(trace_pipeline(model, Tree::tuple({x}), {}, PipeSplit::at({{"2"}})));
  stages.train(false);
  drop->eval();
  EXPECT_TRUE(stages(x).equal(model.forward(Tree::tuple({x}), {}).tensor()));
}

TEST(TracedAutocast, AnotherOneThanInTheTraceIsRefused) {
  torch::nn::Sequential net(linear(0), linear(1));
  const at::Tensor x = values({6, 4}, 1);
  const auto trace = [&] { return Stages(trace_pipeline(net, Tree::tuple({x}), {}, PipeSplit::into(2))); };
  const Stages plain = trace();
  std::optional<Stages> cast;
  at::Tensor expected;
  {
    const AutocastScope casts(at::kCPU, at::kBFloat16);
    const std::string said = message_of<ValueError>([&] { plain(x); });
    EXPECT_TRUE(has_text(said, "autocast is BFloat16 on cpu, in the trace it was off")) << said;
    cast.emplace(trace());
    expected = net->forward(x);
    EXPECT_TRUE((*cast)(x).equal(expected));
  }
  EXPECT_EQ(expected.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { (*cast)(x); }), "autocast is off, in the trace it was"));
}

TEST(TracedAutocast, AnotherDefaultDtypeThanInTheTraceIsRefused) {
  const StageModule model([](at::Tensor x) { return x + torch::tensor({1.0, 2.0}) / 3; }, {});
  const at::Tensor x = at::ones({2}, at::kDouble);
  const Stages stages(trace_pipeline(model, Tree::tuple({x}), {}, PipeSplit::into(1)));
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  std::string said;
  try {
    stages(x);
  } catch (const ValueError& error) {
    said = error.what();
  }
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  EXPECT_TRUE(has_text(said, "the default dtype is Double, in the trace it was Float"));
}

// -------------------------------------------------------------------------------------------------------
// modules of a Sequential

struct Peeking : torch::nn::Module {
  explicit Peeking(bool typed) : by_type(typed) {
    body = register_module("body", torch::nn::Sequential(linear(0), torch::nn::Tanh(), linear(1)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor weight =
        by_type ? body->at<torch::nn::LinearImpl>(0).weight : body[0]->as<torch::nn::Linear>()->weight;
    return body->forward(x) + weight.sum();
  }
  bool by_type;
  torch::nn::Sequential body{nullptr};
};

TEST(TracedSequentials, AForwardThatLooksIntoOne) {
  const at::Tensor x = values({6, 4}, 1);
  for (const bool by_type : {true, false}) {
    const auto net = std::make_shared<Peeking>(by_type);
    const Stages stages(trace_pipeline(StageModule(net), Tree::tuple({x}), {}, PipeSplit::at({{"body.2"}})));
    const Tree between = stages.all[0].forward(Tree::tuple({x}), {});
    EXPECT_TRUE(stages.all[1].forward(between, {}).tensor().equal(net->forward(x)));
    EXPECT_NO_THROW(net->body->at<torch::nn::LinearImpl>(0)) << "as before the trace";
    EXPECT_NE(net->body[0]->as<torch::nn::Linear>(), nullptr);
  }
}

struct SplitImpl : torch::nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {x.sin(), x.cos()}; }
};
struct JoinImpl : torch::nn::Module {
  at::Tensor forward(std::tuple<at::Tensor, at::Tensor> both) {
    return std::get<0>(both) * std::get<1>(both);
  }
};

// Modules without parameters are known by their reports alone, whatever they take and return.
TEST(TracedSequentials, ModulesOfAnyArguments) {
  torch::nn::Sequential net;
  net->push_back("a", linear(0));
  net->push_back("split", std::make_shared<SplitImpl>());
  net->push_back("join", std::make_shared<JoinImpl>());
  net->push_back("drop", torch::nn::Dropout(0.0));
  const at::Tensor x = values({6, 4}, 1);
  const Pipe pipe = trace_pipeline(net, Tree::tuple({x}), {}, PipeSplit::at({{"join"}}));
  EXPECT_TRUE(has_text(pipe.stage_text(0), "in module 'split'"));
  const Stages stages(pipe);
  EXPECT_TRUE(stages(x).equal(net->forward(x)));
}

// -------------------------------------------------------------------------------------------------------
// devices

at::Tensor only_on_cpu(const at::Tensor& x) { return at::sin(x); }

TORCH_LIBRARY(traced_stages_test, library) { library.def("only_on_cpu(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(traced_stages_test, CPU, library) { library.impl("only_on_cpu", only_on_cpu); }
TORCH_LIBRARY_IMPL(traced_stages_test, Meta, library) { library.impl("only_on_cpu", only_on_cpu); }

struct CpuOnly : torch::nn::Module {
  CpuOnly() { a = register_module("a", linear(0)); }
  at::Tensor forward(const at::Tensor& x) {
    static const auto call = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("traced_stages_test::only_on_cpu", "")
                                 .typed<at::Tensor(const at::Tensor&)>();
    const ModuleScope scope(*a);
    return a->forward(call.call(x));
  }
  torch::nn::Linear a{nullptr};
};

TEST(TracedDevices, OperatorsThatADeviceDoesNotHaveAreNamed) {
  const auto net = std::make_shared<CpuOnly>();
  const Pipe pipe =
      trace_pipeline(StageModule(net), Tree::tuple({values({2, 4}, 1)}), {}, PipeSplit::into(1));
  EXPECT_NO_THROW(stage_module(pipe, 0, at::kCPU));
  const std::string said = message_of<ValueError>([&] { stage_module(pipe, 0, at::kCUDA); });
  EXPECT_TRUE(has_text(said, "traced_stages_test::only_on_cpu")) << said;
  EXPECT_TRUE(has_text(said, "in module 'a'")) << said;
  EXPECT_TRUE(has_text(said, "TraceOptions::device")) << said;
  EXPECT_TRUE(net->a->weight.is_cpu()) << "nothing was moved";
}

}  // namespace traced_stages_test
}  // namespace penstock
