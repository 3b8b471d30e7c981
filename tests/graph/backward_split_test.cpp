// Backward graphs in two parts: the gradients that somebody waits for, and those of parameters. Both together
// have the bits of one graph.
#include "penstock/graph/partition/backward_split.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/run/capture_codec.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/run/half_requests.h"
#include "penstock/graph_compiler.h"
#include "tests/graph/budget_model.h"
#include "tests/graph/cache_folder.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/weight_net.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace backward_split_test {

using test::has_text;
using test::message_of;
using test::WeightNet;

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 200;
}

// A function that has parameters of its own.
struct WithParameters {
  std::function<Tensors(const Tensors&)> function;
  Tensors parameters;

  Function of_values() const {
    return [function = function, found = parameters.size()](const Values& values) {
      Tensors inputs;
      for (std::size_t i = found; i < values.size(); ++i) inputs.push_back(values[i].toTensor());
      return values_of(function(inputs));
    };
  }
  Convention convention() const { return {.found = parameters.size(), .names = {}}; }
  Values values(const Tensors& inputs) const {
    Values all = values_of(parameters);
    for (const at::Tensor& input : inputs) all.emplace_back(input);
    return all;
  }
  PartitionedCapture capture(const Tensors& inputs, CompileOptions options = {}) const {
    options.split_backward = true;
    return partition(with_explicit_states(capture_function(of_values(), values(inputs), convention()),
                                          {.effects = options.effect_tokens,
                                           .random_numbers = options.explicit_random_states}),
                     SplitOptions(options));
  }
  BackwardParts parts(const Tensors& inputs, CompileOptions options = {}) const {
    const PartitionedCapture captured = capture(inputs, options);
    return split_backward_graph(captured.halves.backward, backward_roles(captured.capture, captured.halves),
                                captured.halves.deferred);
  }
};

at::Tensor parameter(at::IntArrayRef shape) { return (torch::randn(shape) * 0.4).set_requires_grad(true); }

std::multiset<std::string> operators_of(const Graph& graph) {
  std::multiset<std::string> names;
  for (const Node& node : graph.nodes) names.insert(node.op.operator_name().name);
  return names;
}

std::size_t count_of(const Graph& graph, const std::string& name) { return operators_of(graph).count(name); }

std::size_t returned(const Graph& graph, std::size_t first, std::size_t end) {
  std::size_t count = 0;
  for (std::size_t i = first; i < end; ++i) count += graph.outputs[i].value() != kNoValue;
  return count;
}

// ---- what waits ----

TEST(BackwardSplit, ProductsOfParametersWait) {
  torch::manual_seed(1);
  const at::Tensor up = parameter({16, 8}), down = parameter({8, 16}), bias = parameter({16}),
                   gain = parameter({8});
  const WithParameters net{
      [=](const Tensors& in) {
        const at::Tensor h = torch::layer_norm(in[0], {8}, gain);
        return Tensors{in[0] + torch::linear(torch::gelu(torch::linear(h, up, bias)), down)};
      },
      {up, down, bias, gain}};
  const BackwardParts parts = net.parts({torch::randn({4, 8}).set_requires_grad(true)});
  // Two products for the gradients of activations, two for those of the weights.
  EXPECT_EQ(count_of(parts.inputs.graph, "aten::mm"), 2u);
  EXPECT_EQ(count_of(parts.weights.graph, "aten::mm"), 2u);
  EXPECT_EQ(count_of(parts.inputs.graph, "aten::native_layer_norm_backward"), 1u);
  // The gradient that the bias sums is kept for its weight anyway.
  EXPECT_EQ(parts.is_deferred, (std::vector<char>{1, 1, 1, 0, 0}));
  EXPECT_EQ(returned(parts.inputs.graph, 0, 5), 2u);
  EXPECT_EQ(returned(parts.weights.graph, 0, 5), 3u);
  // The gradients that arrive at the two products.
  EXPECT_EQ(parts.kept, 2u);
  // Neither takes all that was saved, and the activations are not for both.
  EXPECT_FALSE(parts.inputs.saved.empty());
  EXPECT_FALSE(parts.weights.saved.empty());
}

// The gain and the shift of a norm without weights are computed at once: later they would keep activations.
TEST(BackwardSplit, VectorsDoNotWaitIfThatKeepsMemory) {
  torch::manual_seed(1);
  const at::Tensor weight = parameter({8, 8}), gain = parameter({8}), shift = parameter({8});
  const WithParameters net{
      [=](const Tensors& in) {
        return Tensors{torch::linear(in[0].sin(), weight).sin().mul(gain).cos().add(shift).sin()};
      },
      {weight, gain, shift}};
  const BackwardParts parts = net.parts({torch::randn({64, 8}).set_requires_grad(true)});
  EXPECT_EQ(parts.is_deferred, (std::vector<char>{1, 0, 0, 0}));
  EXPECT_EQ(parts.kept, 1u);
}

TEST(BackwardSplit, NothingWaitsWithoutMatrices) {
  torch::manual_seed(1);
  const at::Tensor gain = parameter({8}), table = parameter({4, 8});
  const WithParameters vectors{[=](const Tensors& in) { return Tensors{(in[0] * gain).tanh()}; }, {gain}};
  const at::Tensor x = torch::randn({4, 8}).set_requires_grad(true);
  EXPECT_TRUE(vectors.capture({x}).halves.deferred.empty());
  // The gradient of what is only added is there at once.
  const WithParameters added{[=](const Tensors& in) { return Tensors{(in[0] + table).tanh()}; }, {table}};
  EXPECT_TRUE(added.capture({x}).halves.deferred.empty());
}

// The first stage: nobody waits for its chain, but all that waits would keep all that was saved.
TEST(BackwardSplit, TheChainOfAFirstStageDoesNotWait) {
  torch::manual_seed(1);
  const at::Tensor table = parameter({5, 8}), a = parameter({8, 8}), b = parameter({8, 8}),
                   c = parameter({8, 8});
  const WithParameters net{[=](const Tensors& in) {
                             at::Tensor h = torch::embedding(table, in[0]);
                             for (const at::Tensor& w : {a, b, c}) h = torch::linear(h.sin(), w).tanh();
                             return Tensors{h};
                           },
                           {table, a, b, c}};
  const BackwardParts parts = net.parts({torch::randint(5, {4}, at::kLong)});
  EXPECT_EQ(count_of(parts.inputs.graph, "aten::mm"), 3u);
  EXPECT_EQ(count_of(parts.weights.graph, "aten::mm"), 3u);
  EXPECT_EQ(count_of(parts.weights.graph, "aten::embedding_dense_backward"), 1u);
  EXPECT_EQ(count_of(parts.weights.graph, "aten::cos"), 0u);
  EXPECT_EQ(parts.kept, 4u);
}

// One operator computes all gradients of a convolution.
TEST(BackwardSplit, ConvolutionsAreDivided) {
  torch::manual_seed(1);
  const at::Tensor kernel = parameter({3, 2, 3, 3}), bias = parameter({3});
  const WithParameters net{
      [=](const Tensors& in) { return Tensors{torch::conv2d(in[0].sin(), kernel, bias, 1, 1).tanh()}; },
      {kernel, bias}};
  const BackwardParts parts = net.parts({torch::randn({2, 2, 5, 5}).set_requires_grad(true)});
  EXPECT_EQ(count_of(parts.inputs.graph, "aten::convolution_backward"), 1u);
  EXPECT_EQ(count_of(parts.weights.graph, "aten::convolution_backward"), 1u);
  EXPECT_EQ(parts.is_deferred, (std::vector<char>{1, 1, 0}));
}

// What is computed again for one part belongs to it; what both need is kept.
TEST(BackwardSplit, RecomputationIsWhereItIsNeeded) {
  torch::manual_seed(1);
  const at::Tensor up = parameter({16, 8}), down = parameter({8, 16});
  const WithParameters net{
      [=](const Tensors& in) { return Tensors{torch::linear(torch::gelu(torch::linear(in[0], up)), down)}; },
      {up, down}};
  const BackwardParts parts =
      net.parts({torch::randn({4, 8}).set_requires_grad(true)}, {.activations = {.budget = "0"}});
  // gelu's argument: computed again for its derivative, and kept. Its result: for the weight of `down` alone.
  EXPECT_EQ(count_of(parts.inputs.graph, "aten::gelu"), 0u);
  EXPECT_EQ(count_of(parts.weights.graph, "aten::gelu"), 1u);
  EXPECT_EQ(count_of(parts.weights.graph, "aten::mm"), 2u);
  EXPECT_EQ(count_of(parts.inputs.graph, "aten::mm"), 3u);
}

// Drawing keeps its order, whoever needs it.
TEST(BackwardSplit, WhatDrawsDoesNotWait) {
  struct Noisy : torch::autograd::Function<Noisy> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              const at::Tensor& w) {
      context->save_for_backward({x, w});
      return x.mm(w);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& gradients) {
      const auto saved = context->get_saved_variables();
      return {gradients[0].mm(saved[1].t()), torch::dropout(saved[0], 0.5, true).t().mm(gradients[0])};
    }
  };
  torch::manual_seed(1);
  const at::Tensor weight = parameter({8, 8});
  const WithParameters net{[=](const Tensors& in) { return Tensors{Noisy::apply(in[0], weight)}; }, {weight}};
  for (const bool explicit_states : {false, true}) {
    const BackwardParts parts = net.parts({torch::randn({4, 8}).set_requires_grad(true)},
                                          {.explicit_random_states = explicit_states});
    EXPECT_EQ(count_of(parts.weights.graph, "aten::mm"), 1u);
    for (const Node& node : parts.weights.graph.nodes) EXPECT_FALSE(must_run(node));
  }
}

// ---- the same bits ----

struct Gradients {
  Tensors outputs, inputs, parameters;
};

using Call = std::function<Tensors(const Tensors&)>;

Call call_of(const WithParameters& net, const CompileOptions& options,
             std::shared_ptr<Compiled>* made = nullptr) {
  const auto compiled = std::make_shared<Compiled>(net.of_values(), options, net.convention());
  if (made) *made = compiled;
  return [net, compiled](const Tensors& inputs) {
    Tensors results;
    for (const c10::IValue& value : (*compiled)(net.values(inputs))) results.push_back(value.toTensor());
    return results;
  };
}

// Three calls, so that gradients of parameters add up.
Gradients gradients_of(const Call& call, const Tensors& parameters,
                       const std::function<Tensors(unsigned)>& inputs_of, int backwards = 1) {
  for (const at::Tensor& each : parameters) each.mutable_grad() = at::Tensor();
  Gradients all;
  for (unsigned i = 0; i < 3; ++i) {
    const Tensors inputs = inputs_of(i);
    torch::manual_seed(17 + i);
    Tensors roots, slopes;
    for (const at::Tensor& output : call(inputs)) {
      all.outputs.push_back(output.detach());
      if (!output.requires_grad()) continue;
      roots.push_back(output);
      slopes.push_back(output.detach() * 0.5 + 0.7);
    }
    for (int k = 0; k < backwards && !roots.empty(); ++k)
      torch::autograd::backward(roots, slopes, /*retain_graph=*/k + 1 < backwards);
    for (const at::Tensor& input : inputs) all.inputs.push_back(input.grad());
  }
  for (const at::Tensor& each : parameters)
    all.parameters.push_back(each.grad().defined() ? each.grad().clone() : at::Tensor());
  return all;
}

void expect_same(const Gradients& actual, const Gradients& expected, Compare compare = Compare::Exactly) {
  graph::expect_same(actual.outputs, expected.outputs, "output", compare);
  graph::expect_same(actual.inputs, expected.inputs, "gradient of input", compare);
  graph::expect_same(actual.parameters, expected.parameters, "gradient of parameter", compare);
}

TEST(BackwardSplit, RandomNetsHaveTheBitsOfOneGraph) {
  unsigned split = 0, both = 0;
  for (unsigned seed = 0; seed < programs() && !::testing::Test::HasFailure(); ++seed) {
    const auto weights = std::make_shared<WeightNet>(seed);
    const WithParameters net{[weights](const Tensors& in) { return (*weights)(in); }, weights->parameters()};
    const auto inputs_of = [&](unsigned call) { return weights->inputs(call); };
    const Gradients plain = gradients_of(net.function, net.parameters, inputs_of);
    const char* budget = seed % 3 == 0 ? "1" : seed % 3 == 1 ? "0.3" : "0";
    SCOPED_TRACE("seed " + std::to_string(seed) + " at " + budget);
    CompileOptions options{.activations = {.budget = budget}, .explicit_random_states = seed % 4 != 0};
    if (seed % 5 == 4) options.activations.budget = "1", options.partitioner = Partitioner::MinCut;
    if (seed % 7 == 6) options.second_derivatives = SecondDerivatives::Refuse;
    // The least that backward needs may be more than a third.
    const auto run = [&](std::shared_ptr<Compiled>* made) {
      try {
        return gradients_of(call_of(net, options, made), net.parameters, inputs_of);
      } catch (const ValueError& error) {
        if (!has_text(error.what(), "the activation budget")) throw;
        options.activations.budget = "0";
        return gradients_of(call_of(net, options, made), net.parameters, inputs_of);
      }
    };
    const Gradients whole = run(nullptr);
    options.split_backward = true;
    std::shared_ptr<Compiled> compiled;
    const Gradients halves = run(&compiled);
    {
      const ::testing::ScopedTrace trace(__FILE__, __LINE__, "one graph, and the function itself");
      // A convolution in a graph may round in another way: one of a thousand nets shows it.
      expect_same(whole, plain, Compare::Closely);
    }
    {
      const ::testing::ScopedTrace trace(__FILE__, __LINE__, "two graphs, and one");
      expect_same(halves, whole);
    }
    if (compiled->joint(0).tangents.empty()) continue;
    const Partition& parts = compiled->partition(0);
    split += !parts.deferred.empty();
    both += !parts.deferred.empty() && parts.deferred.size() < parts.backward.nodes.size();
  }
  EXPECT_GE(split * 2, programs());
  EXPECT_GE(both * 3, programs());
}

TEST(BackwardSplit, GraphsCanBeRetained) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const auto weights = std::make_shared<WeightNet>(seed);
    const WithParameters net{[weights](const Tensors& in) { return (*weights)(in); }, weights->parameters()};
    const auto inputs_of = [&](unsigned call) { return weights->inputs(call); };
    SCOPED_TRACE(seed);
    expect_same(gradients_of(call_of(net, {.split_backward = true}), net.parameters, inputs_of, 3),
                gradients_of(net.function, net.parameters, inputs_of, 3));
  }
}

// A net with both parts: a product and a norm.
struct Sample {
  Sample() {
    torch::manual_seed(5);
    weight = parameter({8, 8});
    gain = parameter({8});
    net = {[w = weight, g = gain](const Tensors& in) {
             return Tensors{torch::linear(torch::layer_norm(in[0], {8}, g).tanh(), w).sin()};
           },
           {weight, gain}};
    x = torch::randn({4, 8}).set_requires_grad(true);
  }
  at::Tensor weight, gain, x;
  WithParameters net;
};

TEST(BackwardSplit, GradientsOfSomeAlone) {
  const Sample s;
  const Call call = call_of(s.net, {.split_backward = true});
  for (const Tensors& asked :
       {Tensors{s.x}, Tensors{s.weight}, Tensors{s.gain}, Tensors{s.gain, s.weight, s.x}}) {
    const at::Tensor plain = s.net.function({s.x})[0].pow(2).sum(), fast = call({s.x})[0].pow(2).sum();
    graph::expect_same(torch::autograd::grad({fast}, asked), torch::autograd::grad({plain}, asked),
                       "gradient");
  }
  // First without the second part, then with it.
  const at::Tensor fast = call({s.x})[0].pow(2).sum(), plain = s.net.function({s.x})[0].pow(2).sum();
  torch::autograd::grad({fast}, {s.x}, {}, /*retain_graph=*/true);
  graph::expect_same(torch::autograd::grad({fast}, {s.weight}), torch::autograd::grad({plain}, {s.weight}),
                     "gradient");
  EXPECT_THROW(torch::autograd::grad({fast}, {s.weight}), c10::Error);
}

TEST(BackwardSplit, HooksOfParametersSeeEachGradientOnce) {
  const Sample s;
  const Call call = call_of(s.net, {.split_backward = true});
  int calls = 0;
  const unsigned hook = s.weight.register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  call({s.x})[0].pow(2).sum().backward();
  const at::Tensor doubled = s.weight.grad().clone();
  s.weight.remove_hook(hook);
  s.weight.mutable_grad() = at::Tensor();
  s.net.function({s.x})[0].pow(2).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(doubled, s.weight.grad() * 2));
}

TEST(BackwardSplit, IsDifferentiatedAgain) {
  const WarningCapture silent;
  const Sample s;
  const Call call = call_of(s.net, {.split_backward = true});
  const auto derivatives = [&](const Call& of) {
    const Tensors first =
        torch::autograd::grad({of({s.x})[0].pow(2).sum()}, {s.x, s.weight, s.gain}, {}, true,
                              /*create_graph=*/true);
    at::Tensor sum = torch::zeros({});
    for (const at::Tensor& each : first) sum = sum + each.pow(2).sum();
    Tensors all = torch::autograd::grad({sum}, {s.x, s.weight, s.gain});
    for (const at::Tensor& each : first) all.push_back(each.detach());
    return all;
  };
  graph::expect_same(derivatives(call), derivatives(s.net.function), "derivative", Compare::Closely);
}

// Written between forward and backward: what either part needs.
TEST(BackwardSplit, WritesBeforeBackwardAreErrors) {
  const Sample s;
  const Call call = call_of(s.net, {.split_backward = true});
  for (const at::Tensor& written : {s.weight, s.gain}) {
    const at::Tensor y = call({s.x})[0].pow(2).sum();
    {
      const at::NoGradGuard no_grad;
      written.mul_(1);
    }
    EXPECT_TRUE(has_text(message_of<c10::Error>([&] { y.backward(); }), "modified by an inplace operation"));
  }
  // A result that only the gradient of a weight needs.
  const at::Tensor weight = parameter({8, 8}), other = parameter({8, 8});
  const WithParameters net{[=](const Tensors& in) {
                             const at::Tensor h = torch::linear(in[0], other).sin();
                             return Tensors{h, torch::linear(h, weight)};
                           },
                           {weight, other}};
  const Call two = call_of(net, {.split_backward = true});
  const Tensors results = two({s.x});
  {
    const at::NoGradGuard no_grad;
    results[0].mul_(2);
  }
  EXPECT_TRUE(has_text(message_of<c10::Error>([&] { results[1].sum().backward(); }),
                       "modified by an inplace operation"));
}

// Counts its backwards in an input.
struct CountsInBackward : torch::autograd::Function<CountsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& counts) {
    context->save_for_backward({counts});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    context->get_saved_variables()[0].add_(1);
    return {gradients[0] * 2, at::Tensor()};
  }
};

// The first part writes the buffer, and the second one would find it changed.
TEST(BackwardSplit, WhatReadsABufferThatBackwardWritesDoesNotWait) {
  torch::manual_seed(1);
  const at::Tensor a = parameter({8, 8}), b = parameter({8, 8});
  for (const bool viewed : {false, true}) {
    SCOPED_TRACE(viewed);
    const WithParameters net{[=](const Tensors& in) {
                               const at::Tensor h = CountsInBackward::apply(in[0], in[1]),
                                                rows = viewed ? in[1].view({4, 8}) : in[1];
                               return Tensors{(torch::linear(h, a) + torch::linear(rows, b)).sin()};
                             },
                             {a, b}};
    const at::Tensor before = viewed ? torch::randn({32}) : torch::randn({4, 8});
    const BackwardParts parts = net.parts({torch::randn({4, 8}).set_requires_grad(true), before});
    EXPECT_EQ(parts.is_deferred, (std::vector<char>{1, 0, 0, 0}));
    const auto run = [&](const Call& call, const at::Tensor& counts) {
      return gradients_of(call, net.parameters, [&](unsigned i) {
        return Tensors{at::randn({4, 8}, at::detail::createCPUGenerator(i)).set_requires_grad(true), counts};
      });
    };
    const at::Tensor expected = before.clone(), actual = before.clone();
    expect_same(run(call_of(net, {.split_backward = true}), actual), run(net.function, expected));
    EXPECT_TRUE(torch::equal(actual, expected));
    EXPECT_FALSE(torch::equal(actual, before));
  }
}

// A result is held by no node that leads to it.
TEST(BackwardSplit, ACallThatIsDroppedIsFreed) {
  const at::Tensor weight = parameter({8, 8}), other = parameter({8, 8});
  const WithParameters net{[=](const Tensors& in) {
                             const at::Tensor h = torch::linear(in[0], other).sin();
                             return Tensors{h, torch::linear(h, weight).tanh()};
                           },
                           {weight, other}};
  const Call call = call_of(net, {.split_backward = true});
  const at::Tensor x = torch::randn({4, 8}).set_requires_grad(true);
  call({x});
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  for (const bool backward : {false, true}) {
    std::vector<Weak> weak;
    {
      const Tensors results = call({x});
      for (const at::Tensor& result : results) weak.emplace_back(result.getIntrusivePtr());
      if (backward) (results[0].sum() + results[1].sum()).backward();
    }
    for (const Weak& result : weak) EXPECT_TRUE(result.expired()) << backward;
  }
}

// A model as users compile it, with dropout, recomputed or not.
TEST(BackwardSplit, AModelHasTheBitsOfOneGraph) {
  for (const char* budget : {"1", "0.3", "0"}) {
    SCOPED_TRACE(budget);
    std::vector<Tensors> gradients;
    for (const bool split : {false, true}) {
      budget_model::Model model(2);
      CompileOptions options = budget_model::with_budget(budget);
      options.split_backward = split;
      auto fast = compile(model, options);
      torch::manual_seed(9);
      for (int i = 0; i < 2; ++i) fast->forward(budget_model::input_of_model()).backward();
      Tensors& all = gradients.emplace_back();
      for (const at::Tensor& each : model->parameters()) all.push_back(each.grad());
      EXPECT_EQ(compiled_entry(*fast, 0).partition(0).deferred.empty(), !split);
    }
    graph::expect_same(gradients[1], gradients[0], "gradient");
  }
}

// Sizes that differ from call to call.
TEST(BackwardSplit, ForAllSizes) {
  const Sample s;
  const CompileOptions options{.dynamic = {.dims = {{2, 0, "B"}}}, .split_backward = true};
  std::shared_ptr<Compiled> compiled;
  const Call call = call_of(s.net, options, &compiled);
  for (const std::int64_t rows : {4, 7, 3}) {
    const auto inputs_of = [&](unsigned i) {
      return Tensors{at::randn({rows, 8}, at::detail::createCPUGenerator(i)).set_requires_grad(true)};
    };
    expect_same(gradients_of(call, s.net.parameters, inputs_of),
                gradients_of(s.net.function, s.net.parameters, inputs_of));
  }
  EXPECT_EQ(compiled->captures(), 1u);
  EXPECT_FALSE(compiled->partition(0).deferred.empty());
}

// ---- what compilers get ----

// Keeps what it was asked for. Its code is the number of nodes.
struct NotingCompiler final : GraphCompiler {
  std::string_view name() const override { return "noting"; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                               const CompileRequest& request) const override {
    requests.push_back({graph, request});
    return graph_compiler(kExecutorCompiler)->compile(graph, request);
  }
  std::optional<std::vector<std::uint8_t>> artifact(const CompiledGraph& compiled) const override {
    return std::vector<std::uint8_t>{
        static_cast<std::uint8_t>(dynamic_cast<const Executor&>(compiled).input_count())};
  }
  std::shared_ptr<const CompiledGraph> load(const Graph& graph, const CompileRequest& request,
                                            std::span<const std::uint8_t> code) const override {
    EXPECT_EQ(code.size(), 1u);
    EXPECT_EQ(code[0], graph.inputs.size());
    ++loaded;
    return graph_compiler(kExecutorCompiler)->compile(graph, request);
  }
  mutable std::vector<std::pair<Graph, CompileRequest>> requests;
  mutable int loaded = 0;
};

std::shared_ptr<const NotingCompiler> noting() {
  static const auto compiler = [] {
    auto made = std::make_shared<const NotingCompiler>();
    register_graph_compiler(made);
    return made;
  }();
  return compiler;
}

TEST(BackwardSplit, CompilersGetBothParts) {
  const Sample s;
  noting()->requests.clear();
  const Call call = call_of(s.net, {.split_backward = true, .compiler = "noting"});
  call({s.x})[0].pow(2).sum().backward();
  ASSERT_EQ(noting()->requests.size(), 3u);
  const auto& [inputs, of_inputs] = noting()->requests[1];
  const auto& [weights, of_weights] = noting()->requests[2];
  EXPECT_EQ(of_inputs.role, GraphRole::Backward);
  EXPECT_EQ(of_weights.role, GraphRole::Backward);
  // The weight and the gain are parameters, whichever part takes them; the second part needs neither.
  EXPECT_EQ(of_inputs.static_inputs.size(), 2u);
  EXPECT_TRUE(of_weights.static_inputs.empty());
  // tanh's result is needed by both, and the first one must not overwrite it.
  ASSERT_FALSE(of_weights.donated_inputs.empty());
  std::set<std::string> shared;
  for (const Placeholder& input : weights.inputs) shared.insert(input.name);
  std::size_t both = 0;
  for (std::size_t i = 0; i < inputs.inputs.size(); ++i) {
    if (!shared.contains(inputs.inputs[i].name)) continue;
    ++both;
    EXPECT_EQ(std::count(of_inputs.donated_inputs.begin(), of_inputs.donated_inputs.end(), i), 0)
        << inputs.inputs[i].name;
  }
  EXPECT_EQ(both, 1u);
}

TEST(BackwardSplit, CodeOfBothPartsIsKept) {
  const CacheFolder folder;
  const auto inputs_of = [](unsigned i) {
    return Tensors{at::randn({4, 8}, at::detail::createCPUGenerator(i)).set_requires_grad(true)};
  };
  const Sample s;
  const Gradients plain = gradients_of(s.net.function, s.net.parameters, inputs_of);
  // The option is part of the key: none loads what another one has stored.
  for (const bool again : {false, true})
    for (const bool split : {false, true})
      for (const char* identity : {"", "a function"}) {
        SCOPED_TRACE(std::to_string(again) + std::to_string(split) + identity);
        noting()->loaded = 0;
        std::shared_ptr<Compiled> compiled;
        const CompileOptions options =
            folder.options(identity, {.split_backward = split, .compiler = "noting"});
        expect_same(gradients_of(call_of(s.net, options, &compiled), s.net.parameters, inputs_of), plain);
        EXPECT_EQ(compiled->partition(0).deferred.empty(), !split);
        const bool graphs_stored = again || *identity != '\0';
        EXPECT_EQ(noting()->loaded, graphs_stored ? (split ? 3 : 2) : 0);
        EXPECT_EQ(compiled->loaded(), again && *identity != '\0' ? 1u : 0u);
      }
}

TEST(BackwardSplit, IsStoredWithTheCapture) {
  const Sample s;
  const PartitionedCapture made = s.net.capture({s.x});
  ASSERT_FALSE(made.halves.deferred.empty());
  const Bytes bytes = encode_capture(made);
  const PartitionedCapture read = decode_capture(bytes);
  EXPECT_EQ(read.halves.deferred, made.halves.deferred);
  EXPECT_EQ(encode_capture(read), bytes);
  const auto refusal = [&](const std::function<void(PartitionedCapture&)>& spoil) {
    PartitionedCapture spoiled = made;
    spoil(spoiled);
    return message_of<ValueError>([&] { decode_capture(encode_capture(spoiled)); });
  };
  EXPECT_TRUE(
      has_text(refusal([](auto& c) { c.halves.deferred.push_back(1000); }), "nodes that do not exist"));
  EXPECT_TRUE(
      has_text(refusal([](auto& c) { std::reverse(c.halves.deferred.begin(), c.halves.deferred.end()); }),
               "nodes that do not exist, or in another order"));
  EXPECT_TRUE(has_text(refusal([](auto& c) { c.halves.deferred = {0}; }), "which is deferred"));
}

}  // namespace backward_split_test
}  // namespace penstock::graph
