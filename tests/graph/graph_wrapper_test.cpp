// Wrappers inside autograd, inputs that the graph writes itself, and wrappers of a user, alone and together.
#include "penstock/graph/wrap/graph_wrapper.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_call.h"
#include "tests/graph/random_program.h"
#include "tests/graph/registered_wrappers.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace graph_wrapper_test {

using sample::Boxed;
using test::has_text;
using test::message_of;
using test::same_tensor;
using Lines = std::vector<std::string>;

// Notes the order of everything it is asked, and how many tensors pass it.
class Noting final : public GraphWrapper {
 public:
  Noting(std::string name, Lines* notes) : name_(std::move(name)), notes_(notes) {}
  std::string_view name() const override { return name_; }
  std::string decision() const override { return "notes"; }
  void before_compile(Graph& graph, CompileRequest& request) const override {
    notes_->push_back(name_ + " before " + std::string(to_text(request.role)) + " of " +
                      std::to_string(graph.nodes.size()));
  }
  std::shared_ptr<const CompiledGraph> around(std::shared_ptr<const CompiledGraph> inner,
                                              GraphRole role) const override {
    notes_->push_back(name_ + " around " + std::string(to_text(role)));
    return std::make_shared<Around>(name_, std::move(inner), notes_);
  }

 private:
  class Around final : public CompiledGraph {
   public:
    Around(std::string name, std::shared_ptr<const CompiledGraph> inner, Lines* notes)
        : name_(std::move(name)), inner_(std::move(inner)), notes_(notes) {}
    std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
      std::size_t subclasses = 0;
      for (const at::Tensor& input : inputs) subclasses += is_subclass(input) ? 1 : 0;
      notes_->push_back(name_ + " runs with " + std::to_string(subclasses) + " subclasses");
      return inner_->run(std::move(inputs), sizes);
    }

   private:
    std::string name_;
    std::shared_ptr<const CompiledGraph> inner_;
    Lines* notes_;
  };

  std::string name_;
  Lines* notes_;
};

CompiledCall compiled_with(const Function& function, const Values& inputs, GraphWrappers outside) {
  return {partition(capture_function(function, inputs), Partitioner::Default),
          graph_compiler(kExecutorCompiler),
          {.outside = std::move(outside)}};
}

TEST(GraphWrappers, ChangeGraphsInOrderAndWrapInReverse) {
  Lines notes;
  const at::Tensor x = torch::randn({3}).set_requires_grad(true);
  const CompiledCall call =
      compiled_with([](const Values& in) -> Values { return {in[0].toTensor().sin()}; }, {x},
                    {std::make_shared<Noting>("outer", &notes), std::make_shared<Noting>("inner", &notes)});
  EXPECT_EQ(notes, (Lines{"outer before forward of 1", "inner before forward of 1", "inner around forward",
                          "outer around forward", "outer before backward of 2", "inner before backward of 2",
                          "inner around backward", "outer around backward"}));
  EXPECT_EQ(call.wrapper_decisions(), (Lines{"epilogue: writes no input", "outer: notes", "inner: notes"}));
  notes.clear();
  call.run({x})[0].toTensor().sum().backward();
  EXPECT_EQ(notes, (Lines{"outer runs with 0 subclasses", "inner runs with 0 subclasses",
                          "outer runs with 0 subclasses", "inner runs with 0 subclasses"}));
  EXPECT_TRUE(at::equal(x.grad(), x.detach().cos()));
}

// Replaces one operator by another in both halves.
class ExpIsCos final : public GraphWrapper {
 public:
  std::string_view name() const override { return "exp is cos"; }
  void before_compile(Graph& graph, CompileRequest&) const override {
    for (Node& node : graph.nodes)
      if (node.op.operator_name().name == "aten::exp")
        node.op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::cos", "");
  }
};

TEST(GraphWrappers, WhatTheyMakeOfAGraphIsCompiled) {
  const at::Tensor x = torch::randn({3});
  const CompiledCall call = compiled_with([](const Values& in) -> Values { return {in[0].toTensor().exp()}; },
                                          {x}, {std::make_shared<ExpIsCos>()});
  EXPECT_TRUE(at::equal(call.run({x})[0].toTensor(), x.cos()));
}

// A user's wrapper outside of the subclasses sees them, one of the plain tensors' graph would not.
TEST(GraphWrappers, SubclassesAreOne) {
  test::register_sample_kinds();
  Lines notes;
  const Function function = [](const Values& in) -> Values {
    return {in[0].toTensor() * in[1].toTensor(), in[1].toTensor().sin()};
  };
  const auto inputs = [] {
    torch::manual_seed(3);
    return Tensors{Boxed::make(torch::randn({4})).set_requires_grad(true),
                   Boxed::make(torch::randn({4})).set_requires_grad(true)};
  };
  const Tensors ours = inputs(), plain = inputs();
  const CompiledCall call =
      compiled_with(function, values_of(ours), {std::make_shared<Noting>("outer", &notes)});
  EXPECT_EQ(call.wrapper_decisions(), (Lines{"epilogue: writes no input", "outer: notes",
                                             "subclasses: 2 of 2 inputs, 2 of 2 results, 2 of 2 gradients"}));
  notes.clear();
  const Values actual = call.run(values_of(ours)), expected = function(values_of(plain));
  for (const Values* results : {&actual, &expected})
    ((*results)[0].toTensor().sum() + (*results)[1].toTensor().sum()).backward();
  EXPECT_EQ(notes, (Lines{"outer runs with 2 subclasses", "outer runs with 0 subclasses"}));
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(same_tensor(actual[i].toTensor().detach(), expected[i].toTensor().detach()));
    EXPECT_TRUE(same_tensor(ours[i].grad(), plain[i].grad()));
  }
}

// ---- inputs that the graph writes itself ----

std::size_t writes_in_forward(const Compiled& compiled) {
  return count_writes(compiled.partition(compiled.captures() - 1).forward);
}

TEST(KeepInputMutations, TheGraphWritesWhereAutogradWouldNotNotice) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor before = in[0].toTensor().clone() * in[1].toTensor();
    in[0].toTensor().mul_(2).add_(1);
    return {before + in[0].toTensor()};
  };
  Compiled kept(function, {.keep_input_mutations = true}), plain(function);
  for (int step = 0; step < 2; ++step) {
    torch::manual_seed(step);
    const at::Tensor x = torch::randn({4}), w = torch::randn({4}).set_requires_grad(true);
    const at::Tensor a = x.clone(), b = x.clone(), u = w.detach().clone().set_requires_grad(true);
    const auto version = a._version();
    const at::Tensor actual = kept({a, w})[0].toTensor(), expected = function({b, u})[0].toTensor();
    EXPECT_TRUE(at::equal(a, b));
    EXPECT_TRUE(at::equal(actual, expected));
    EXPECT_GT(a._version(), version);
    actual.sum().backward();
    expected.sum().backward();
    EXPECT_TRUE(at::equal(w.grad(), u.grad()));
    plain({x, w});
  }
  EXPECT_EQ(writes_in_forward(kept), 1u);
  EXPECT_EQ(writes_in_forward(plain), 0u);
  EXPECT_EQ(kept.inner_meta(0).mutated_in_graph(), std::vector<std::size_t>{0});
  EXPECT_EQ(kept.inner_meta(0).mutated_in_graph_seen_by_autograd(), std::vector<std::size_t>{0});
  EXPECT_TRUE(kept.inner_meta(0).mutated_at_run_time().empty());
  // A gradient is involved: after the graph.
  const at::Tensor w = torch::randn({4}).set_requires_grad(true);
  kept({w * 1, w});
  EXPECT_EQ(writes_in_forward(kept), 0u);
  // The shape changes as well.
  Compiled turned(
      [](const Values& in) -> Values {
        const at::NoGradGuard no_grad;
        in[0].toTensor().mul_(2).t_();
        return {in[0].toTensor() + 1};
      },
      {.keep_input_mutations = true});
  const at::Tensor x = torch::ones({2, 3});
  turned({x});
  EXPECT_EQ(writes_in_forward(turned), 0u);
  EXPECT_EQ(x.sizes(), (at::IntArrayRef{3, 2}));
}

// Each becomes the other: neither write may be seen by the other one's source.
TEST(KeepInputMutations, InputsThatSwap) {
  Compiled kept(
      [](const Values& in) -> Values {
        const at::Tensor old = in[0].toTensor().clone();
        in[0].toTensor().copy_(in[1].toTensor());
        in[1].toTensor().copy_(old);
        return {};
      },
      {.keep_input_mutations = true});
  const at::Tensor a = torch::zeros({2}), b = torch::ones({2});
  kept({a, b});
  EXPECT_TRUE(at::equal(a, torch::ones({2})));
  EXPECT_TRUE(at::equal(b, torch::zeros({2})));
  EXPECT_EQ(writes_in_forward(kept), 2u);
}

// Forward may not hand on, or keep for backward, what it is about to overwrite.
TEST(KeepInputMutations, WhatIsReturnedFromWrittenMemoryIsCopiedBefore) {
  FunctionCapture capture = capture_function(
      [](const Values& in) -> Values {
        const at::Tensor before = in[0].toTensor() + 0;
        in[0].toTensor().add_(1);
        return {before};
      },
      {torch::zeros({2})}, {}, default_call_wrappers(), /*keep_input_mutations=*/true);
  // A pass has seen that adding 0 changes nothing.
  capture.joint.graph.outputs[0] = Operand::of(capture.joint.graph.inputs[0].value);
  const CompiledCall call(partition(std::move(capture), Partitioner::Default),
                          graph_compiler(kExecutorCompiler));
  const at::Tensor x = torch::zeros({2});
  EXPECT_TRUE(at::equal(call.run({x})[0].toTensor(), torch::zeros({2})));
  EXPECT_TRUE(at::equal(x, torch::ones({2})));
}

TEST(KeepInputMutations, InInferenceMode) {
  const c10::InferenceMode inference;
  Compiled kept(
      [](const Values& in) -> Values {
        in[0].toTensor().add_(1);
        return {in[0].toTensor() * 2};
      },
      {.keep_input_mutations = true});
  const at::Tensor x = torch::zeros({2});
  EXPECT_TRUE(at::equal(kept({x})[0].toTensor(), torch::full({2}, 2.0)));
  EXPECT_TRUE(at::equal(x, torch::ones({2})));
  EXPECT_EQ(writes_in_forward(kept), 1u);
}

TEST(KeepInputMutations, NotForSubclasses) {
  test::register_sample_kinds();
  const Function function = [](const Values& in) -> Values {
    in[0].toTensor().mul_(2);
    return {in[0].toTensor() + in[1].toTensor()};
  };
  Compiled kept(function, {.keep_input_mutations = true});
  const at::Tensor x = Boxed::make(torch::ones({2})), y = Boxed::make(torch::ones({2}));
  EXPECT_TRUE(same_tensor(kept({x, y})[0].toTensor(), Boxed::make(torch::full({2}, 3.0))));
  EXPECT_EQ(writes_in_forward(kept), 0u);
}

// ---- wrappers of a user ----

struct InDouble final : ValueWrapper {
  std::string name() const override { return "in double"; }
  at::Tensor input(const std::string&, const at::Tensor& tensor) const override {
    return tensor.scalar_type() == at::kFloat ? tensor.to(at::kDouble) : tensor;
  }
  at::Tensor result(std::size_t, const at::Tensor& tensor) const override {
    return tensor.scalar_type() == at::kDouble ? tensor.to(at::kFloat) : tensor;
  }
};

struct Halving final : ValueWrapper {
  std::string name() const override { return "halving"; }
  at::Tensor result(std::size_t index, const at::Tensor& tensor) const override {
    return index == 0 ? tensor / 2 : tensor;
  }
};

TEST(ValueWrappers, ChangeArgumentsAndResultsOfAModule) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(4, 3));
  net->to(at::kDouble);
  auto fast = compile(net, {.wrappers = {std::make_shared<Halving>(), std::make_shared<InDouble>()}});
  const at::Tensor x = torch::randn({2, 4}).set_requires_grad(true),
                   y = x.detach().clone().set_requires_grad(true);
  const at::Tensor actual = fast->forward(x), expected = net->forward(y.to(at::kDouble)).to(at::kFloat) / 2;
  EXPECT_TRUE(at::equal(actual, expected));
  actual.sum().backward();
  expected.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
  EXPECT_EQ(fast->wrappers(), (Lines{"halving", "in double: replaces args[0]", "epilogue: writes no input"}));
}

// Parameters and buffers are the module's own, and numbers are no tensors.
TEST(ValueWrappers, GetTheTensorsAmongTheArgumentsAndResults) {
  struct Asked final : ValueWrapper {
    std::string name() const override { return "asked"; }
    at::Tensor input(const std::string& name, const at::Tensor& tensor) const override {
      asked.insert(name);
      return tensor;
    }
    at::Tensor result(std::size_t index, const at::Tensor& tensor) const override {
      asked.insert("result " + std::to_string(index));
      return tensor;
    }
    mutable std::set<std::string> asked;
  };
  const auto asked = std::make_shared<Asked>();
  Compiled compiled(
      [](const Values& in) -> Values {
        return {3, in[0].toTensor() * in[1].toTensor() + in[2].toInt()};
      },
      {.wrappers = {asked}}, {.found = 1, .names = {"weight", "x", "number"}});
  const at::Tensor weight = torch::ones({2}), x = torch::ones({2});
  for (int run = 0; run < 2; ++run) {
    asked->asked.clear();
    compiled({weight, x, 4});
    EXPECT_EQ(asked->asked, (std::set<std::string>{"x", "result 1"}));
  }
}

// They get the arguments of the call: the library's own have not changed them yet.
TEST(ValueWrappers, AreOutsideOfTheLibrarysOwn) {
  struct Copying final : ValueWrapper {
    std::string name() const override { return "copying"; }
    at::Tensor input(const std::string& name, const at::Tensor& tensor) const override {
      return name == "input 1" ? tensor.clone() : tensor;
    }
  };
  Compiled compiled(
      [](const Values& in) -> Values {
        in[0].toTensor().add_(1);
        return {in[0].toTensor() + in[1].toTensor()};
      },
      {.wrappers = {std::make_shared<Copying>()}});
  const at::Tensor x = torch::ones({2});
  // Without the copy, both arguments are the tensor that is written.
  EXPECT_TRUE(at::equal(compiled({x, x})[0].toTensor(), torch::full({2}, 3.0)));
  EXPECT_TRUE(at::equal(x, torch::full({2}, 2.0)));
  EXPECT_EQ(compiled.wrappers(0), (Lines{"copying", "epilogue"}));
}

TEST(ValueWrappers, AWriteMustReachTheArgument) {
  Compiled compiled(
      [](const Values& in) -> Values {
        in[0].toTensor().add_(1);
        return {in[0].toTensor() * 2};
      },
      {.wrappers = {std::make_shared<InDouble>()}});
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { compiled({torch::ones({2})}); }),
                       "wrapper 'in double' replaces input 0, which the function writes"));
  EXPECT_TRUE(at::equal(compiled({torch::ones({2}, at::kDouble)})[0].toTensor(), torch::full({2}, 4.0)));
}

TEST(ValueWrappers, BadOnesAreRefused) {
  const Function function = [](const Values& in) -> Values { return {in[0].toTensor() * 2}; };
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { Compiled(function, {.wrappers = {nullptr}}); }),
                       "one of the wrappers is null"));
  EXPECT_TRUE(has_text(
      message_of<ValueError>([&] {
        Compiled(function, {.dynamic = {.dims = {{0, 0}}}, .wrappers = {std::make_shared<Halving>()}});
      }),
      "wrapper 'halving' and dynamic dims cannot be combined"));
  struct Losing final : ValueWrapper {
    std::string name() const override { return "losing"; }
    at::Tensor input(const std::string&, const at::Tensor&) const override { return {}; }
  };
  Compiled losing(function, {.wrappers = {std::make_shared<Losing>()}});
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { losing({torch::ones({2})}); }),
                       "wrapper 'losing' returned an undefined tensor for input 0"));
}

// ---- all of them ----

TEST(Wrappers, RandomCompositionsOverRandomPrograms) {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  const unsigned programs = asked ? static_cast<unsigned>(std::stoul(asked)) : 300;
  unsigned compared = 0, kept = 0, composed = 0;
  for (unsigned seed = 0; seed < programs; ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    torch::manual_seed(seed);
    const auto numbers = [](at::IntArrayRef sizes, bool grad) {
      return torch::randint(-4, 5, sizes).to(at::kFloat).set_requires_grad(grad);
    };
    const Tensors leaves{numbers({3, 4}, seed % 2 != 0), numbers({3, 4}, seed % 3 == 0),
                         numbers({4}, seed % 5 == 0)};
    const auto prepare = [&](const Tensors& fresh) {
      Tensors inputs = cloned(fresh);
      if (seed % 4 == 1) inputs.push_back(inputs[0].slice(0, 1));
      if (seed % 4 == 2) inputs.push_back(inputs[1]);
      return inputs;
    };
    const Function function = over_tensors([&](const Tensors& in) { return random_program(seed, in); });
    const bool halves = seed % 7 < 3;
    const Function plain = [&](const Values& in) {
      Values results = function(in);
      if (halves) results[0] = results[0].toTensor() / 2;
      return results;
    };
    Trace expected;
    try {
      expected = trace_of(plain, leaves, prepare);
    } catch (const c10::Error&) {
      continue;  // not a legal program
    }
    try {
      CompileOptions options{.partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default,
                             .keep_input_mutations = seed % 8 != 7};
      if (halves) options.wrappers.push_back(std::make_shared<Halving>());
      Compiled compiled(function, options);
      for (int round = 0; round < 2; ++round) {
        const Trace actual = trace_of([&](const Values& in) { return compiled(in); }, leaves, prepare);
        expect_same(actual.outputs, expected.outputs, "output");
        expect_same(actual.inputs, expected.inputs, "input");
        if (expected.refused) continue;
        EXPECT_FALSE(actual.refused);
        expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
      }
      ++compared;
      kept += writes_in_forward(compiled) > 0;
      composed += compiled.wrappers(0).size() > 2;
    } catch (const NotImplemented&) {
    } catch (const std::exception& error) {
      // A function whose own backward throws cannot be captured.
      if (!expected.refused) ADD_FAILURE() << error.what();
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(compared * 10, programs * 4) << "of " << programs << " programs";
  EXPECT_GT(kept, programs / 10);
  EXPECT_GT(composed, programs / 20);
}

}  // namespace graph_wrapper_test
}  // namespace penstock::graph
