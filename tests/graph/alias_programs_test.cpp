// Operators that return the memory of their argument, whatever their schemas say: random programs of them
// with writes, under reuse of memory and all passes, have the bits and the shared memory of the plain run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>

#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/operator_traits.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/random_program.h"

namespace penstock::graph {
namespace alias_programs_test {

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 300;
}

// With `writes`, also in-place operators.
Tensors alias_program(unsigned seed, const Tensors& inputs, bool writes) {
  std::mt19937 random(seed);
  const auto choose = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  Tensors pool = inputs;
  const auto any = [&] {
    return pool[choose(3) > 0 ? pool.size() - 1 - choose(std::min<std::size_t>(pool.size(), 3))
                              : choose(pool.size())];
  };
  const std::size_t steps = 4 + choose(12);
  for (std::size_t step = 0; step < steps; ++step) {
    const at::Tensor x = any();
    at::Tensor y = any();
    for (int i = 0; i < 4 && y.sizes() != x.sizes(); ++i) y = any();
    if (y.sizes() != x.sizes()) y = x;
    switch (choose(writes ? 18 : 14)) {
      case 0:
      case 1:
      case 2:
      case 3:
        pool.push_back(random_steps::same_memory(choose(random_steps::kSameMemory), x));
        break;
      case 4:
        // They return the tensor itself, and have no derivatives of their own.
        if (writes)
          pool.push_back(choose(2) > 0 ? at::lift(x) : at::lift_fresh(x));
        else
          pool.push_back(x.is_contiguous() ? at::_unsafe_view(x, {1, x.numel()}) : x);
        break;
      case 5:
        pool.push_back(x.detach());
        break;
      case 6:
        pool.push_back(x.dim() == 2 ? x.t() : x.unsqueeze(0));
        break;
      case 7:
        pool.push_back(x.reshape({-1}).view({-1, 2}));
        break;
      case 8:
        pool.push_back(x.clone());
        break;
      case 9:
        pool.push_back(x * 1.5);
        break;
      case 10:
        pool.push_back(x + y);
        break;
      case 11:
        pool.push_back(at::tanh(x));
        break;
      case 12:
        pool.push_back(at::_unsafe_view((x * y).contiguous(), {-1}).neg());
        break;
      case 13:
        pool.push_back(x * 1);
        break;
      case 14:
        x.mul_(0.5);
        break;
      case 15:
        x.add_(y.is_alias_of(x) ? y.clone() : y);
        break;
      case 16:
        x.copy_(y.neg());
        break;
      default:
        x.select(0, 0).zero_();
    }
  }
  Tensors results;
  const std::size_t count = 1 + choose(3);
  for (std::size_t i = 0; i < count; ++i) results.push_back(pool[pool.size() - 1 - i]);
  return results;
}

Tensors inputs_of(unsigned seed) {
  torch::manual_seed(seed);
  return {torch::randint(-8, 9, {4, 6}).to(at::kFloat), torch::randn({6, 4}), torch::randn({24})};
}

Tensors tensors_of(const std::vector<c10::IValue>& values) {
  Tensors tensors;
  for (const c10::IValue& value : values) tensors.push_back(value.toTensor());
  return tensors;
}

TEST(AliasPrograms, ThroughTheExecutorWithReuseOfMemory) {
  const at::NoGradGuard no_grad;
  std::size_t reuses = 0;
  for (unsigned seed = 0; seed < programs() && !HasFailure(); ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    const auto function = [&](const Tensors& in) { return alias_program(seed, in, true); };
    const Tensors inputs = inputs_of(seed);
    Graph graph = capture_forward(over_tensors(function), values_of(inputs));
    const std::size_t outputs = graph.outputs.size();
    Tensors written = cloned(inputs);
    const Tensors expected = function(written);
    const Executor as_it_is(graph);
    const Executor functional(functionalize(Graph(graph), outputs));
    reuses += functional.counts().reuses;
    for (int run = 0; run < 2; ++run) {
      Tensors given = cloned(inputs);
      expect_same(tensors_of(as_it_is(given)), expected, "with writes, output");
      expect_same(given, written, "with writes, input");
      given = cloned(inputs);
      expect_same(tensors_of(functional(given)), expected, "without writes, output");
      expect_same(given, inputs, "without writes, input");
    }
    if (HasFailure()) ADD_FAILURE() << to_text(graph);
  }
  EXPECT_GT(reuses, programs() / 4);
}

void compare_compiled(bool grad) {
  unsigned compared = 0;
  for (unsigned seed = 0; seed < programs() && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    const c10::AutoGradMode mode(grad);
    const Function function =
        over_tensors([&](const Tensors& in) { return alias_program(seed, in, /*writes=*/!grad); });
    Tensors leaves = inputs_of(seed);
    for (at::Tensor& leaf : leaves) leaf.set_requires_grad(grad);
    const auto prepare = [](const Tensors& fresh) { return cloned(fresh); };
    Compiled compiled(function, {.verify_passes = true});
    const Trace expected = trace_of(function, leaves, prepare);
    try {
      for (int run = 0; run < 2; ++run) {
        const Trace actual = trace_of([&](const Values& in) { return compiled(in); }, leaves, prepare);
        expect_same(actual.outputs, expected.outputs, "output");
        expect_same(actual.inputs, expected.inputs, "input");
        expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
        if (run == 1) expect_same_memory(actual, expected);  // writes the results
      }
      ++compared;
    } catch (const NotImplemented&) {
      // A result in the memory of an input that autograd does not know as a view of it.
    }
  }
  EXPECT_GT(compared * 2, programs());
}

TEST(AliasPrograms, ThroughCompiledWithWrites) { compare_compiled(false); }
TEST(AliasPrograms, ThroughCompiledWithGradients) { compare_compiled(true); }

// ---- one at a time ----

Graph graph_of(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs) {
  const at::NoGradGuard no_grad;
  return capture_function(over_tensors(function), values_of(inputs)).joint.graph;
}

std::size_t nodes_named(const Graph& graph, const std::string& op) {
  return static_cast<std::size_t>(
      std::count_if(graph.nodes.begin(), graph.nodes.end(),
                    [&](const Node& node) { return node.op.operator_name().name == op; }));
}

TEST(UndeclaredViews, TraitsSayWhereTheResultIs) {
  for (const char* name : {"aten::_unsafe_view", "aten::lift"}) {
    const OperatorTraits& traits = traits_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""));
    EXPECT_EQ(traits.returns[0].kind, ReturnAlias::Kind::View) << name;
    EXPECT_EQ(traits.returns[0].argument, 0) << name;
    EXPECT_FALSE(traits.returns[0].declared) << name;
    EXPECT_TRUE(traits.any_alias && !traits.pure_view && !traits.mutates) << name;
  }
  const OperatorTraits& view = traits_of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::view", ""));
  EXPECT_TRUE(view.returns[0].declared && view.pure_view);
  // What LibTorch does, which the table repeats.
  const at::Tensor x = torch::ones({2, 3});
  EXPECT_TRUE(at::_unsafe_view(x, {6}).is_alias_of(x));
  EXPECT_TRUE(at::lift(x).is_alias_of(x));
}

TEST(UndeclaredViews, AreWrittenWithTheirArgument) {
  const at::NoGradGuard no_grad;
  const auto function = [](const Tensors& in) {
    const at::Tensor y = in[0] * 2;
    at::_unsafe_view(y, {-1}).add_(1);
    at::lift(in[1]).mul_(3);
    return Tensors{y, in[1] + 0.5};
  };
  const Tensors inputs{torch::randn({2, 3}), torch::randn({3})};
  Tensors plain = cloned(inputs), ours = cloned(inputs);
  const Tensors expected = function(plain);
  Compiled compiled(over_tensors(function));
  expect_same(tensors_of(compiled(values_of(ours))), expected, "output");
  expect_same(ours, plain, "input");
}

// A copy whose memory a result is in must not be left out.
TEST(UndeclaredViews, ResultsInACopyDoNotGetIntoTheMemoryOfInputs) {
  const at::NoGradGuard no_grad;
  Compiled compiled(over_tensors([](const Tensors& in) {
    return Tensors{at::_unsafe_view(in[0].clone(), {-1}), at::lift(in[0] * 1)};
  }));
  const at::Tensor x = torch::randn({2, 3}), kept = x.clone();
  for (const c10::IValue& result : compiled({x})) {
    EXPECT_FALSE(result.toTensor().is_alias_of(x));
    result.toTensor().zero_();
  }
  EXPECT_TRUE(torch::equal(x, kept));
}

TEST(UndeclaredViews, OfInputsThatNobodyHoldsAreNotOverwritten) {
  for (const bool declared : {true, false}) {
    const Graph graph = graph_of(
        [&](const Tensors& in) {
          return Tensors{(declared ? in[0].view({8}) : at::_unsafe_view(in[0], {8})).tanh()};
        },
        {torch::randn({2, 4})});
    const auto overwrites = [&](const Executor& run) {
      at::Tensor x = torch::randn({2, 4});
      const void* memory = x.data_ptr();
      Tensors inputs;
      inputs.push_back(std::move(x));
      return run(std::move(inputs))[0].toTensor().data_ptr() == memory;
    };
    EXPECT_EQ(Executor(graph).counts().reuses, 0u) << declared;
    EXPECT_FALSE(overwrites(Executor(graph))) << declared;
    EXPECT_TRUE(overwrites(Executor(graph, {.donated_inputs = {0}}))) << declared;
  }
}

// A write to all of a product through its view needs no copy.
TEST(UndeclaredViews, ABiasIsAddedWithoutACopy) {
  const Tensors inputs{torch::randn({2, 4, 3}).transpose(1, 2), torch::randn({4, 5}), torch::randn({5})};
  const auto function = [](const Tensors& in) {
    return Tensors{at::matmul(in[0], in[1]).add_(in[2]).relu_()};
  };
  const Graph graph = graph_of(function, inputs);
  EXPECT_EQ(nodes_named(graph, "aten::as_strided_scatter"), 0u) << to_text(graph);
  EXPECT_EQ(nodes_named(graph, "aten::clone"),
            nodes_named(graph_of([](const Tensors& in) { return Tensors{at::matmul(in[0], in[1])}; }, inputs),
                        "aten::clone"));
  expect_same(tensors_of({Executor(graph)(inputs)[0]}), {function(inputs)[0]}, "output");
}

}  // namespace alias_programs_test
}  // namespace penstock::graph
