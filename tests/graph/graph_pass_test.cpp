// Each pass alone: where it changes the graph, where it must not, and what passes a capture goes through.
#include "penstock/graph_pass.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/names/pass_names.h"
#include "penstock/graph/passes/pass_check.h"
#include "penstock/graph/passes/pass_list.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph/run/graph_passes.h"
#include "penstock/torch/dispatch/constant_tensor.h"
#include "tests/graph/cache_folder.h"
#include "tests/graph/call_trace.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace graph_pass_test {
namespace {

using test::has_text;
using test::message_of;

PassPointer pass_named(const std::string& name) {
  for (const PassPointer& pass : standard_passes())
    if (pass->name() == name) return pass;
  throw ValueError("no pass named " + name);
}

// Of all overloads.
std::size_t count_of(const Graph& graph, const std::string& op) {
  return static_cast<std::size_t>(
      std::count_if(graph.nodes.begin(), graph.nodes.end(),
                    [&](const Node& node) { return node.op.operator_name().name == op; }));
}

// The graph without a backward of a function, before and after one pass. Both run with the same bits.
struct Passed {
  Graph before, after;
  std::size_t removed() const { return before.nodes.size() - after.nodes.size(); }
};

// What the function returns; the gradients of a graph without a backward are undefined.
std::vector<at::Tensor> run(const Graph& graph, const Tensors& inputs) {
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : Executor(graph)(inputs))
    if (value.toTensor().defined()) results.push_back(value.toTensor());
  EXPECT_FALSE(results.empty());
  return results;
}

void expect_same_bits(const Tensors& actual, const Tensors& expected) {
  expect_same(actual, expected, "output");
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].strides(), expected[i].strides());
    if (!actual[i].is_floating_point()) continue;
    EXPECT_TRUE(torch::equal(actual[i].signbit().logical_and(actual[i].eq(actual[i])),
                             expected[i].signbit().logical_and(expected[i].eq(expected[i]))));
  }
}

Passed pass(const std::string& name, const Tensors& inputs,
            const std::function<Tensors(const Tensors&)>& function) {
  const at::NoGradGuard no_grad;
  FunctionCapture capture = capture_function(over_tensors(function), values_of(inputs));
  Passed passed{capture.joint.graph, {}};
  PassContext context;
  context.role = PassRole::Inference;
  passed.after = pass_named(name)->run(passed.before, context);
  check_pass(passed.before, passed.after, name);
  expect_same_bits(run(passed.after, inputs), run(passed.before, inputs));
  return passed;
}

// How many nodes a pass removes.
std::size_t removed_by(const std::string& name, const Tensors& inputs,
                       const std::function<Tensors(const Tensors&)>& function) {
  return pass(name, inputs, function).removed();
}

at::Tensor special_numbers(at::ScalarType dtype = at::kFloat) {
  return torch::tensor({-0.0, 0.0, 1.5, -2.0, static_cast<double>(INFINITY), static_cast<double>(-INFINITY),
                        static_cast<double>(NAN), 1e-41})
      .to(dtype);
}

using Step = std::function<at::Tensor(const at::Tensor&)>;

// The number of nodes that "algebraic" removes if what a step returns is not an output itself.
std::size_t simplified(const at::Tensor& x, const Step& step) {
  return removed_by("algebraic", {x}, [&](const Tensors& in) {
    const at::Tensor y = step(in[0]);
    return Tensors{(y.is_complex() ? y : y.to(at::kDouble)).reciprocal()};
  });
}

}  // namespace

TEST(AlgebraicPass, RemovesWhatKeepsTheBits) {
  const at::Tensor whole = torch::arange(-3, 5);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = special_numbers(dtype);
    EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t * 1; }), 1u) << dtype;
    EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return 1.0 * t; }), 1u) << dtype;
    EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t / 1; }), 1u) << dtype;
    EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t - 0; }), 1u) << dtype;
    EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t + (-0.0); }), 1u) << dtype;
    EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t.neg().neg(); }), 1u) << dtype;
    EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t.clone(); }), 1u) << dtype;
  }
  EXPECT_EQ(simplified(whole, [](const at::Tensor& t) { return t * 1; }), 1u);
  EXPECT_EQ(simplified(whole, [](const at::Tensor& t) { return t + 0; }), 1u);
  EXPECT_EQ(simplified(whole, [](const at::Tensor& t) { return 0 + t; }), 1u);
  EXPECT_EQ(simplified(whole, [](const at::Tensor& t) { return t - 0; }), 1u);
}

TEST(AlgebraicPass, KeepsWhatChangesABitADtypeOrALayout) {
  const at::Tensor x = special_numbers(), whole = torch::arange(-3, 5);
  // -0.0 + 0 is +0.0, and so is -0.0 - (-0.0).
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t + 0; }), 0u);
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t + 0.0; }), 0u);
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t - (-0.0); }), 0u);
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return at::sub(t, at::Scalar(0.0), -1); }), 0u);
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t * 2; }), 0u);
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return at::reciprocal(t * 1).mul(-1); }), 1u)
      << "a product with -1 stays";
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return 1 / t; }), 0u);
  // Whole numbers become floating-point ones.
  EXPECT_EQ(simplified(whole, [](const at::Tensor& t) { return t * 1.0; }), 0u);
  EXPECT_EQ(simplified(whole, [](const at::Tensor& t) { return t / 1; }), 0u);
  EXPECT_EQ(simplified(whole, [](const at::Tensor& t) { return t - 0.0; }), 0u);
  EXPECT_EQ(simplified(whole.gt(0), [](const at::Tensor& t) { return t * 1; }), 0u);
  // (a + bi) * 1 has a NaN where b is infinite.
  EXPECT_EQ(simplified(at::complex(x, x.flip(0)), [](const at::Tensor& t) { return t * 1; }), 0u);
  // A tensor of another shape or layout.
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t.expand({2, 8}) * 1; }), 0u);
  EXPECT_EQ(simplified(x, [](const at::Tensor& t) { return t.slice(0, 1) * 1; }), 0u);
  EXPECT_EQ(simplified(x.view({2, 4}), [](const at::Tensor& t) { return t.t().contiguous(); }), 0u);
}

TEST(AlgebraicPass, OutputsStayTensorsOfTheirOwn) {
  const at::Tensor x = special_numbers();
  const auto removed = [&](const std::function<Tensors(const Tensors&)>& function) {
    return removed_by("algebraic", {x}, function);
  };
  EXPECT_EQ(removed([](const Tensors& in) { return Tensors{in[0] * 1}; }), 0u);
  EXPECT_EQ(removed([](const Tensors& in) { return Tensors{(in[0] * 1).slice(0, 1)}; }), 0u);
  EXPECT_EQ(removed([](const Tensors& in) {
              const at::Tensor y = in[0].sin();
              return Tensors{y, y.clone()};
            }),
            0u);
  // What only the graph sees may be in the memory of an output.
  EXPECT_EQ(removed([](const Tensors& in) {
              const at::Tensor y = in[0].sin();
              return Tensors{y, y.clone().cos()};
            }),
            1u);
}

// In a graph that is split afterwards, what is saved must not get into memory that the program may write
// before backward: `x * 1` is saved for sin, and x may be written.
TEST(AlgebraicPass, SavedTensorsDoNotGetIntoMemoryOfInputs) {
  const Function function = over_tensors([](const Tensors& in) { return Tensors{(in[0] * 1).sin()}; });
  for (const bool with_leaf : {true, false}) {
    Compiled compiled(function, {.verify_passes = true});
    const at::Tensor leaf = torch::ones({3}).set_requires_grad(true);
    const at::Tensor x = with_leaf ? leaf : leaf + 1, before = x.detach().clone();
    const at::Tensor y = compiled({x})[0].toTensor();
    {
      const at::NoGradGuard no_grad;
      x.zero_();
    }
    y.sum().backward();
    EXPECT_TRUE(torch::equal(leaf.grad(), before.cos()));
  }
  // Of what the function itself has made, nobody can write anything.
  FunctionCapture capture =
      capture_function(over_tensors([](const Tensors& in) { return Tensors{(in[0].cos() * 1).sin()}; }),
                       {torch::ones({3}).set_requires_grad(true)});
  PassLog log;
  run_passes_on_joint(capture, PassList({pass_named("algebraic")}, true), &log);
  // Newer versions of LibTorch multiply by 1 in the backward, too.
  EXPECT_GE(log.runs[0].nodes_before - log.runs[0].nodes_after, 1u);
}

TEST(ViewsPass, RemovesViewsThatAreAnotherTensor) {
  const at::Tensor x = torch::randn({3, 4});
  const auto removed = [&](const Step& step) {
    return removed_by("views", {x}, [&](const Tensors& in) { return Tensors{step(in[0]).sin()}; });
  };
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.transpose(0, 1).transpose(0, 1); }), 1u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.t().t(); }), 1u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.expand({3, 4}); }), 1u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.detach(); }), 1u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.view({12}).view({3, 4}); }), 1u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.permute({1, 0}) + t.transpose(0, 1); }), 1u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.t().expand({4, 3}); }), 1u);
  // Another part, another order, another dtype, a conjugate.
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.slice(0, 0, 2) + t.slice(0, 1, 3); }), 0u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.t(); }), 0u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t.view(at::kInt); }), 0u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t._neg_view(); }), 0u);
  EXPECT_EQ(removed([](const at::Tensor& t) { return t._neg_view()._neg_view(); }), 1u);
  EXPECT_EQ(removed([](const at::Tensor& t) {
              return t.expand({2, 3, 4}).select(0, 1);
            }),
            1u)
      << "each row of an expanded tensor is the tensor";
}

TEST(ViewsPass, AViewOfAViewNeedsOnlyOne) {
  const Passed passed = pass("views", {torch::randn({3, 4})}, [](const Tensors& in) {
    return Tensors{in[0].view({12}).view({2, 6}).sin()};
  });
  EXPECT_EQ(count_of(passed.after, "aten::view"), 2u);
  Graph rest = passed.after;
  EXPECT_EQ(remove_dead_nodes(rest), 1u);
}

TEST(ViewsPass, OutputsStayWhatTheyAre) {
  EXPECT_EQ(removed_by("views", {torch::randn({3, 4})},
                       [](const Tensors& in) {
                         const at::Tensor y = in[0].sin();
                         return Tensors{y, y.t().t()};
                       }),
            0u);
}

TEST(CastRemovalPass, RemovesCastsThatChangeNothing) {
  const auto removed = [](at::ScalarType dtype, const Step& step) {
    return removed_by("cast-removal", {special_numbers(dtype)},
                      [&](const Tensors& in) { return Tensors{step(in[0]).mul(2)}; });
  };
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf})
    EXPECT_EQ(removed(narrow, [&](const at::Tensor& t) { return t.to(at::kFloat).to(narrow); }), 1u);
  EXPECT_EQ(removed(at::kFloat, [](const at::Tensor& t) { return t.to(at::kDouble).to(at::kFloat); }), 1u);
  EXPECT_EQ(removed(at::kFloat, [](const at::Tensor& t) { return t.to(at::kFloat, false, true); }), 1u);
  EXPECT_EQ(removed(at::kFloat,
                    [](const at::Tensor& t) {
                      return t.to(at::kHalf) * t.to(at::kHalf, false, false, at::MemoryFormat::Contiguous);
                    }),
            1u);
  EXPECT_EQ(removed_by("cast-removal", {torch::arange(4)},
                       [](const Tensors& in) {
                         const at::Tensor narrow = in[0].to(at::kShort);
                         return Tensors{narrow.to(at::kInt).to(at::kShort) + narrow};
                       }),
            1u);
}

TEST(CastRemovalPass, KeepsWhatRoundsAndWhatIsAnOutput) {
  const auto removed = [](at::ScalarType dtype, const Step& step) {
    return removed_by("cast-removal", {special_numbers(dtype)},
                      [&](const Tensors& in) { return Tensors{step(in[0]).mul(2)}; });
  };
  EXPECT_EQ(removed(at::kFloat, [](const at::Tensor& t) { return t.to(at::kBFloat16).to(at::kFloat); }), 0u);
  EXPECT_EQ(removed(at::kHalf, [](const at::Tensor& t) { return t.to(at::kBFloat16).to(at::kHalf); }), 0u);
  EXPECT_EQ(removed_by("cast-removal", {torch::arange(4) * ((std::int64_t{1} << 60) + 1)},
                       [](const Tensors& in) { return Tensors{in[0].to(at::kDouble).to(at::kLong) + 1}; }),
            0u);
  EXPECT_EQ(removed_by("cast-removal", {special_numbers(at::kHalf)},
                       [](const Tensors& in) { return Tensors{in[0].to(at::kFloat).to(at::kHalf)}; }),
            0u);
}

// bfloat16 -> float32 -> float16 becomes one cast.
TEST(CastRemovalPass, ShortensChains) {
  const Passed passed = pass("cast-removal", {special_numbers(at::kBFloat16)}, [](const Tensors& in) {
    return Tensors{in[0].to(at::kFloat).to(at::kHalf).mul(2)};
  });
  Graph rest = passed.after;
  EXPECT_EQ(remove_dead_nodes(rest), 1u);
  EXPECT_EQ(count_of(rest, "aten::_to_copy"), 1u);
}

TEST(CommonSubexpressionsPass, MergesEqualNodes) {
  const at::Tensor x = torch::randn({3});
  EXPECT_EQ(
      removed_by("common-subexpressions", {x},
                 [](const Tensors& in) { return Tensors{in[0].sin().t() * in[0].sin().t() + in[0].cos()}; }),
      2u);
  // Random numbers, and outputs.
  const at::Tensor one = torch::ones({100});
  const at::NoGradGuard no_grad;
  const FunctionCapture capture =
      capture_function(over_tensors([](const Tensors& in) {
                         return Tensors{torch::dropout(in[0], 0.5, true) - torch::dropout(in[0], 0.5, true),
                                        in[0].sin(), in[0].sin()};
                       }),
                       {one});
  const Graph after = pass_named("common-subexpressions")->run(capture.joint.graph, PassContext());
  check_pass(capture.joint.graph, after, "common-subexpressions");
  EXPECT_EQ(count_of(after, "aten::sin"), 2u);
  EXPECT_FALSE(torch::equal(run(after, {one})[0], torch::zeros({100})));
}

TEST(ConstantFoldingPass, ComputesSmallConstantsOnce) {
  const at::Tensor x = torch::randn({3});
  const Passed passed = pass("constant-folding", {x}, [](const Tensors& in) {
    const at::Tensor steps = (torch::arange(3, at::kLong) + 1).to(at::kFloat).view({3, 1}).squeeze(1);
    return Tensors{in[0] * steps + torch::zeros({}) + torch::full({3}, 2.5f)};
  });
  EXPECT_EQ(count_of(passed.after, "aten::mul"), 1u);
  EXPECT_EQ(passed.after.nodes.size(), 3u) << to_text(passed.after);
}

TEST(ConstantFoldingPass, KeepsWhatMayDifferFromCallToCall) {
  const at::Tensor x = torch::randn({3});
  const auto removed = [&](const std::function<Tensors(const Tensors&)>& function) {
    return removed_by("constant-folding", {x}, function);
  };
  // Each call returns a tensor of its own.
  EXPECT_EQ(removed([](const Tensors& in) {
              return Tensors{torch::zeros({3}).view({3, 1}), in[0].sin()};
            }),
            0u);
  EXPECT_EQ(removed([](const Tensors& in) { return Tensors{in[0] + torch::zeros({1000}).select(0, 1)}; }), 0u)
      << "too large";
  // A tensor that the program holds may be written; one that it has declared as constant is not.
  const at::Tensor held = torch::ones({3}), declared = constant_tensor(torch::ones({3}));
  EXPECT_EQ(removed([&](const Tensors& in) { return Tensors{in[0] + torch::ones({3}).mul(held)}; }), 1u);
  const auto sum_with = [](const at::Tensor& table) {
    const at::NoGradGuard no_grad;
    return capture_function(
        over_tensors([&](const Tensors& in) { return Tensors{in[0] * torch::full({}, 2.f).mul(table)}; }),
        {torch::ones({3})});
  };
  EXPECT_EQ(pass_named("constant-folding")->run(sum_with(declared).joint.graph, PassContext()).nodes.size(),
            1u);
  EXPECT_EQ(pass_named("constant-folding")->run(sum_with(held).joint.graph, PassContext()).nodes.size(), 2u);
  // Random numbers are drawn in each call.
  const at::NoGradGuard no_grad;
  const Graph drawn = capture_function(over_tensors([](const Tensors& in) {
                                         return Tensors{in[0] + torch::bernoulli(torch::full({3}, 0.5f))};
                                       }),
                                       {x})
                          .joint.graph;
  const Graph after = pass_named("constant-folding")->run(drawn, PassContext());
  check_pass(drawn, after, "constant-folding");
  EXPECT_GE(after.nodes.size(), 2u);
}

TEST(ConstantFoldingPass, CallsDoNotShareWhatTheyReturn) {
  Compiled compiled(over_tensors([](const Tensors& in) {
    return Tensors{torch::zeros({2}), in[0] + torch::ones({2})};
  }));
  const at::Tensor first = compiled({torch::ones({2})})[0].toTensor();
  first.fill_(7);
  EXPECT_TRUE(torch::equal(compiled({torch::ones({2})})[0].toTensor(), torch::zeros({2})));
}

TEST(DeadCodePass, KeepsDraws) {
  const at::NoGradGuard no_grad;
  const FunctionCapture capture = capture_function(over_tensors([](const Tensors& in) {
                                                     in[0].cos();
                                                     torch::bernoulli(in[0].abs().clamp_max(1));
                                                     return Tensors{in[0].sin()};
                                                   }),
                                                   {torch::ones({3})});
  Graph graph = capture.joint.graph;
  graph.nodes.insert(graph.nodes.end(), graph.nodes.back());
  graph.nodes.back().results[0] = Operand::of(graph.new_value(graph.values.back().geometry));
  const Graph after = pass_named("dead-code")->run(graph, PassContext());
  check_pass(graph, after, "dead-code");
  EXPECT_EQ(after.nodes.size() + 1, graph.nodes.size());
  EXPECT_EQ(count_of(after, "aten::bernoulli"), 1u);
}

// ---- what is saved ----

struct SavedAfter {
  std::size_t tensors = 0, bytes = 0;
};
SavedAfter saved_after(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs,
                       const std::vector<PassPointer>& passes) {
  FunctionCapture capture = capture_function(over_tensors(function), values_of(inputs));
  const PassList list(passes, true);
  run_passes_on_joint(capture, list, nullptr);
  const PartitionedCapture split = partition(std::move(capture), Partitioner::Default, list, nullptr);
  return {split.halves.saved.size(), split.halves.saved_bytes(split.capture.joint.graph)};
}

TEST(ViewSinkingPass, SavesOneTensorInsteadOfItsViews) {
  const auto several_views = [](const Tensors& in) {
    const at::Tensor y = in[0].sigmoid();
    return Tensors{y.view({2, 6}).t().mm(y.view({2, 6})).mul(y.view({12}).sum())};
  };
  const Tensors inputs{leaf({3, 4})};
  const SavedAfter before = saved_after(several_views, inputs, {}),
                   after = saved_after(several_views, inputs, {pass_named("view-sinking")});
  EXPECT_LT(after.tensors, before.tensors);
  EXPECT_LT(after.bytes, before.bytes);
  Compiled compiled(over_tensors(several_views), {.verify_passes = true});
  const auto same = [](const Tensors& fresh) { return fresh; };
  const Trace expected = trace_of(over_tensors(several_views), inputs, same);
  for (int call = 0; call < 2; ++call) {
    const Trace actual = trace_of([&](const Values& in) { return compiled(in); }, inputs, same);
    expect_same(actual.outputs, expected.outputs, "output");
    expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
  }
}

// A view of a parameter becomes the parameter, which the compiler of backward then knows.
TEST(ViewSinkingPass, SavesParametersThemselves) {
  const Function function = over_tensors([](const Tensors& in) { return Tensors{in[1].mm(in[0].t())}; });
  const at::Tensor weight = leaf({4, 3}), x = leaf({2, 3});
  for (const bool sinks : {false, true}) {
    FunctionCapture capture = capture_function(function, {weight, x}, {1, {"weight"}});
    const PassList passes(sinks ? std::vector<PassPointer>{pass_named("view-sinking"), pass_named("views")}
                                : std::vector<PassPointer>(),
                          true);
    run_passes_on_joint(capture, passes, nullptr);
    const ValueId parameter = capture.joint.graph.inputs[0].value;
    const PartitionedCapture split = partition(std::move(capture), Partitioner::Default, passes, nullptr);
    const std::vector<ValueId>& saved = split.halves.saved;
    EXPECT_EQ(std::find(saved.begin(), saved.end(), parameter) != saved.end(), sinks);
  }
}

// The rest of a large tensor would be kept alive for a small part of it.
TEST(ViewSinkingPass, DoesNotSaveALargerTensor) {
  const auto parts = [](const Tensors& in) {
    const at::Tensor large = in[1].sin();
    return Tensors{in[0] * large.slice(0, 0, 2) + in[0] * large.slice(0, 2, 4)};
  };
  const Tensors inputs{leaf({2}), torch::randn({100})};
  const SavedAfter before = saved_after(parts, inputs, {}),
                   after = saved_after(parts, inputs, {pass_named("view-sinking")});
  EXPECT_EQ(after.tensors, before.tensors);
  EXPECT_EQ(after.bytes, before.bytes);
}

// ---- lists and options ----

TEST(GraphPasses, NamesAreThoseOfThePasses) {
  std::vector<std::string> names;
  for (const PassPointer& pass : standard_passes()) names.emplace_back(pass->name());
  ASSERT_EQ(names.size(), kStandardPasses.size());
  EXPECT_TRUE(std::equal(names.begin(), names.end(), kStandardPasses.begin()));
  for (const std::string& name : names) {
    const std::vector<std::string> known = graph_pass_names();
    EXPECT_NE(std::find(known.begin(), known.end(), name), known.end());
  }
}

TEST(GraphPasses, AnUnknownNameSuggestsTheNearest) {
  const auto refusal = [](const std::string& name) {
    return message_of<ValueError>([&] {
      graph::compile(torch::nn::Linear(2, 2), CompileOptions{.disable_passes = {"views", name}});
    });
  };
  EXPECT_TRUE(has_text(refusal("algebriac"), "disable_passes: got \"algebriac\", expected passes out of "));
  EXPECT_TRUE(has_text(refusal("algebriac"), "did you mean 'algebraic'?"));
  EXPECT_TRUE(has_text(refusal("xyzzyxyzzyxyzzy"), "leave it out"));
}

TEST(GraphPasses, DisabledOnesLeaveTheGraphAlone) {
  const Function function = over_tensors([](const Tensors& in) { return Tensors{(in[0].cos() * 1).sin()}; });
  const auto nodes = [&](std::vector<std::string> disabled) {
    Compiled compiled(function, {.disable_passes = std::move(disabled)});
    compiled({torch::ones({3})});
    return count_of(compiled.joint(0).graph, "aten::mul");
  };
  EXPECT_EQ(nodes({}), 0u);
  EXPECT_EQ(nodes({"views", "collectives"}), 0u);
  EXPECT_EQ(nodes({"algebraic"}), 1u);
}

// Counts its runs, and does what a test asks for.
class OwnPass final : public GraphPass {
 public:
  std::string_view name() const override { return "own-pass"; }
  bool runs_on(PassRole) const override { return true; }
  Graph run(Graph graph, const PassContext& context) const override {
    roles.push_back(context.role);
    donated += context.donated_inputs.size();
    if (break_it) break_it(graph);
    context.note("seen");
    return graph;
  }
  mutable std::vector<PassRole> roles;
  mutable std::size_t donated = 0;
  mutable std::function<void(Graph&)> break_it;
};

TEST(GraphPasses, APassOfTheProgram) {
  static const auto own = [] {
    auto pass = std::make_shared<OwnPass>();
    register_graph_pass(pass, "dead-code");
    return pass;
  }();
  const std::vector<std::string> names = graph_pass_names();
  const auto place = std::find(names.begin(), names.end(), "own-pass");
  ASSERT_NE(place, names.end());
  EXPECT_EQ(*(place + 1), "dead-code");
  EXPECT_TRUE(has_text(message_of<ValueError>([] { register_graph_pass(own); }), "already a pass named"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] { register_graph_pass(nullptr); }), "got no pass"));

  const Function function = over_tensors([](const Tensors& in) { return Tensors{in[0].sin().cos()}; });
  std::string line;
  own->roles.clear();
  Compiled compiled(function, {.log = [&](const std::string& text) { line += text; }});
  const at::Tensor x = torch::ones({3}).set_requires_grad(true);
  compiled({x});
  EXPECT_EQ(own->roles, (std::vector<PassRole>{PassRole::Joint, PassRole::Forward, PassRole::Backward}));
  EXPECT_GE(own->donated, 1u);
  EXPECT_TRUE(has_text(line, "own-pass (forward): 0 nodes less, seen"));
  compiled({torch::ones({3})});
  EXPECT_EQ(own->roles.back(), PassRole::Inference);

  // Graphs that it breaks are found after it.
  const auto broken = [&](std::function<void(Graph&)> how) {
    own->break_it = std::move(how);
    const std::string message = message_of<InvariantError>([&] {
      Compiled checked(function, {.verify_passes = true});
      checked({torch::ones({3})});
    });
    own->break_it = nullptr;
    return message;
  };
  EXPECT_TRUE(has_text(broken([](Graph& graph) { graph.nodes.clear(); }),
                       "the pass 'own-pass' has broken the graph"));
  EXPECT_TRUE(has_text(broken([](Graph& graph) { graph.outputs.clear(); }), "0 outputs, expected 1"));
  EXPECT_TRUE(has_text(broken([](Graph& graph) {
                         graph.outputs[0].values[0] = graph.nodes[0].results[0].values[0];
                         graph.values[index_of(graph.outputs[0].value())].storage =
                             graph[graph.inputs[0].value].storage;
                       }),
                       "shares a tensor or memory"));
  EXPECT_TRUE(has_text(broken([](Graph& graph) {
                         graph.values[index_of(graph.nodes[0].results[0].value())].geometry.dtype =
                             at::kDouble;
                       }),
                       "makes float32[3]"));
}

// A capture for all sizes: its joint graph stays, passes run on the halves.
TEST(GraphPasses, DynamicDims) {
  const Function function = over_tensors([](const Tensors& in) {
    const at::Tensor y = in[0].cos() * 1;
    return Tensors{y.sin() + y.sin() + torch::zeros({})};
  });
  std::string lines;
  CompileOptions options{.dynamic = {.dims = {{0, 0, "B"}}},
                         .log = [&](const std::string& text) { lines += text + "\n"; },
                         .verify_passes = true};
  Compiled compiled(function, options);
  for (const std::int64_t size : {4, 6, 5, 1}) {
    const Tensors leaves{leaf({size, 3})};
    const auto same = [](const Tensors& fresh) { return fresh; };
    const Trace expected = trace_of(function, leaves, same),
                actual = trace_of([&](const Values&in) { return compiled(in); }, leaves, same);
    expect_same(actual.outputs, expected.outputs, "output");
    expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
  }
  ASSERT_TRUE(compiled.is_dynamic(0));
  EXPECT_EQ(count_of(compiled.joint(0).graph, "aten::sin"), 3u);
  EXPECT_EQ(count_of(compiled.partition(0).forward, "aten::sin"), 1u);
  EXPECT_EQ(count_of(compiled.partition(0).forward, "aten::mul"), 1u);
  EXPECT_TRUE(has_text(lines,
                       "constant-folding (forward): left out: it does not take graphs whose sizes are "
                       "symbols"));
}

TEST(GraphPasses, StoredGraphsAreThoseOfThePasses) {
  const Function function = over_tensors(
      [](const Tensors& in) { return Tensors{(in[0].cos() * 1).sin() * (torch::arange(3, at::kLong) + 1)}; });
  const at::Tensor x = torch::ones({3}).set_requires_grad(true);
  // With an identity whole calls are kept, without one halves.
  for (const std::string identity : {"a function", ""}) {
    const CacheFolder folder;
    const auto call = [&](const std::vector<std::string>& disabled) {
      CompileOptions options = folder.options(identity, {.disable_passes = disabled});
      Compiled compiled(function, options);
      const at::Tensor y = compiled({x})[0].toTensor();
      EXPECT_TRUE(torch::equal(y, function({x})[0].toTensor()));
      y.sum().backward();
      return std::pair(compiled.cache_counts().hits, count_of(compiled.joint(0).graph, "aten::mul"));
    };
    const auto hits = [&](const std::vector<std::string>& disabled) { return call(disabled).first; };
    EXPECT_EQ(hits({}), 0u);
    EXPECT_EQ(hits({}), 1u);
    EXPECT_EQ(hits({"algebraic"}), 0u) << "another graph";
    EXPECT_EQ(hits({"algebraic"}), 1u);
    EXPECT_EQ(hits({"algebraic", "views"}), 0u);
    EXPECT_EQ(hits({}), 1u);
    EXPECT_LT(call({}).second, call({"algebraic"}).second);
  }
}

// CacheOptions::verify captures again and compares: with the passes.
TEST(GraphPasses, VerifiedEntriesHaveTheSamePasses) {
  const CacheFolder folder;
  const Function function = over_tensors([](const Tensors& in) { return Tensors{(in[0].cos() * 1).sin()}; });
  for (int i = 0; i < 2; ++i) {
    CompileOptions options = folder.options("a function", {});
    options.cache.verify = true;
    Compiled compiled(function, options);
    compiled({torch::ones({3}).set_requires_grad(true)});
    EXPECT_EQ(compiled.loaded(), static_cast<std::size_t>(i));
  }
}

}  // namespace graph_pass_test
}  // namespace penstock::graph
