// Backward under create_graph: second and third derivatives of captured functions are those of the plain
// ones.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/graph/cache_folder.h"
#include "tests/graph/call_trace.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace second_derivatives_test {

using test::has_text;
using test::message_of;
using torch::autograd::grad;
using OverTensors = std::function<Tensors(const Tensors&)>;

at::Tensor sum_of(const Tensors& tensors) {
  at::Tensor sum = torch::zeros({}, at::kDouble);
  for (const at::Tensor& tensor : tensors)
    if (tensor.defined() && tensor.requires_grad()) sum = sum + (tensor * tensor + tensor).sum();
  return sum;
}

// First, second and third derivatives of the results with respect to all leaves.
std::vector<Tensors> derivatives(const OverTensors& call, const Tensors& leaves, int orders = 3) {
  Tensors fresh;
  for (const at::Tensor& leaf : leaves)
    fresh.push_back(leaf.detach().clone().set_requires_grad(leaf.requires_grad()));
  Tensors asked;
  for (const at::Tensor& leaf : fresh)
    if (leaf.requires_grad()) asked.push_back(leaf);
  std::vector<Tensors> all;
  Tensors of = call(fresh);
  for (int order = 0; order < orders; ++order) {
    const at::Tensor sum = sum_of(of);
    if (!sum.requires_grad()) break;
    of = grad({sum}, asked, {}, /*retain_graph=*/true, /*create_graph=*/true, /*allow_unused=*/true);
    all.push_back(of);
  }
  return all;
}

// Where a call comes from.
enum class From { Captured, Stored, Loaded };

void expect_same_derivatives(const OverTensors& function, const Tensors& leaves, From from,
                             const CompileOptions& options) {
  SCOPED_TRACE(static_cast<int>(from));
  const std::vector<Tensors> expected = derivatives(function, leaves);
  Compiled compiled(over_tensors(function), options);
  const WarningCapture warnings;
  for (int call = 0; call < 2; ++call) {
    const std::vector<Tensors> actual = derivatives(
        [&](const Tensors& in) {
          Tensors results;
          for (const c10::IValue& value : compiled(values_of(in))) results.push_back(value.toTensor());
          return results;
        },
        leaves);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t order = 0; order < actual.size(); ++order)
      for (std::size_t i = 0; i < actual[order].size(); ++i) {
        ASSERT_EQ(actual[order][i].defined(), expected[order][i].defined());
        if (!actual[order][i].defined()) continue;
        EXPECT_TRUE(torch::allclose(actual[order][i], expected[order][i], 1e-9, 1e-10))
            << "order " << order + 1 << ", leaf " << i << "\n"
            << actual[order][i] << "\nexpected\n"
            << expected[order][i];
      }
  }
  EXPECT_EQ(compiled.captures(), 1u);
  EXPECT_EQ(compiled.loaded(), from == From::Loaded ? 1u : 0u) << compiled.cache_counts().text();
  ASSERT_EQ(warnings.warnings().size(), 1u);  // one, however often
  EXPECT_TRUE(has_text(warnings.warnings()[0].message, "create_graph"));
}

// Also of calls that are stored and loaded.
void expect_same_derivatives(const OverTensors& function, const Tensors& leaves,
                             const CompileOptions& options = {}) {
  const CacheFolder folder;
  for (const From from : {From::Captured, From::Stored, From::Loaded})
    expect_same_derivatives(function, leaves, from,
                            from == From::Captured ? options : folder.options("a function", options));
}

at::Tensor wide(at::IntArrayRef sizes, bool requires_grad = true) {
  return torch::randn(sizes, at::kDouble).set_requires_grad(requires_grad);
}

TEST(SecondDerivatives, AreThoseOfTheFunction) {
  torch::manual_seed(3);
  expect_same_derivatives([](const Tensors& in) { return Tensors{in[0].sin().exp()}; }, {wide({3})});
  expect_same_derivatives(
      [](const Tensors& in) {
        const at::Tensor hidden = in[0].mm(in[1]).tanh();
        return Tensors{hidden.mm(in[1].t()).sigmoid(), (hidden * in[2]).sum()};
      },
      {wide({2, 3}), wide({3, 4}), wide({4}, /*requires_grad=*/false)}, {.partitioner = Partitioner::MinCut});
  // Several views of one internal tensor, a view of an input, an input itself, an unused result.
  expect_same_derivatives(
      [](const Tensors& in) {
        const at::Tensor y = in[0].exp();
        return Tensors{y.view({6}), y.t(), in[0].select(0, 1), in[1], in[1].detach(), y.sum().detach()};
      },
      {wide({2, 3}), wide({4})});
}

// An input that was computed from another one, and a tensor that is passed twice: no path counts twice.
TEST(SecondDerivatives, InputsThatDependOnEachOther) {
  torch::manual_seed(4);
  const OverTensors inner = [](const Tensors& in) { return Tensors{(in[0] * in[1]).sin() * in[0]}; };
  for (const bool twice : {false, true}) {
    Compiled compiled(over_tensors(inner));
    const auto around = [&](bool captured) {
      return [&, captured](const Tensors& in) -> Tensors {
        const Tensors args{in[0], twice ? in[0] : in[0].pow(2)};
        return {captured ? compiled(values_of(args))[0].toTensor() : inner(args)[0]};
      };
    };
    const Tensors leaves{wide({5})};
    const auto expected = derivatives(around(false), leaves), actual = derivatives(around(true), leaves);
    for (std::size_t order = 0; order < expected.size(); ++order)
      EXPECT_TRUE(torch::allclose(actual[order][0], expected[order][0], 1e-9, 1e-10)) << order;
  }
}

TEST(SecondDerivatives, RandomFunctions) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    torch::manual_seed(seed);
    const OverTensors function = [seed](const Tensors& in) {
      std::mt19937 random(seed);
      Tensors pool = in;
      const auto any = [&] { return pool[random() % pool.size()]; };
      for (int step = 0; step < 6; ++step) {
        const at::Tensor a = any(), b = any();
        switch (random() % 7) {
          case 0:
            pool.push_back(a.sin());
            break;
          case 1:
            pool.push_back(a * b);
            break;
          case 2:
            pool.push_back(a.mm(b) * 0.3);
            break;
          case 3:
            pool.push_back(a.t());
            break;
          case 4:
            pool.push_back(a.softmax(0) + b);
            break;
          case 5:
            pool.push_back(a.reshape({9}).flip(0).view({3, 3}));
            break;
          default:
            pool.push_back(a.sigmoid() - b.mean());
            break;
        }
      }
      return Tensors{pool.back(), pool[pool.size() - 2]};
    };
    expect_same_derivatives(function, {wide({3, 3}), wide({3, 3})},
                            {.partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default});
    if (HasFatalFailure()) return;
  }
}

// The parameters of a module belong to the function; here one is also upstream of the input.
TEST(SecondDerivatives, OfAModuleThatIsCalledTwice) {
  const CacheFolder folder;
  torch::manual_seed(5);
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Tanh());
  net->to(at::kDouble);
  const at::Tensor x = wide({3, 4});
  {
    auto stored = compile(net, folder.options());
    stored->forward(stored->forward(x));
  }
  auto fast = compile(net, folder.options());
  const auto penalty = [&](const std::function<at::Tensor(const at::Tensor&)>& call) {
    const at::Tensor y = call(call(x)).sum();
    const at::Tensor slope = grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    Tensors asked = net->parameters();
    asked.push_back(x);
    // The gradients of parameters: those of the second call must not be counted again by the first one.
    at::Tensor of_parameters = torch::zeros({}, at::kDouble);
    for (const at::Tensor& gradient : grad({y}, net->parameters(), {}, true, /*create_graph=*/true))
      of_parameters = of_parameters + gradient.pow(2).sum();
    EXPECT_GT(of_parameters.item<double>(), 0);
    return grad({slope.pow(2).sum() + y + of_parameters}, asked);
  };
  const Tensors expected = penalty([&](const at::Tensor& in) { return net->forward(in); });
  const Tensors actual = penalty([&](const at::Tensor& in) { return fast->forward(in); });
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-9, 1e-10)) << i << actual[i] << expected[i];
  EXPECT_EQ(compiled_entry(*fast, 0).loaded(), compiled_entry(*fast, 0).captures());
  const at::Tensor y = fast->forward(x).sum();
  fast->eval();
  EXPECT_TRUE(has_text(message_of<StateError>([&] { grad({y}, {x}, {}, true, true); }),
                       "training flag of a submodule was changed"));
}

TEST(SecondDerivatives, UnderTheAutocastOfForward) {
  const OverTensors function = [](const Tensors& in) { return Tensors{in[0].mm(in[1]).tanh()}; };
  const Tensors leaves{torch::randn({3, 3}).set_requires_grad(true),
                       torch::randn({3, 3}).set_requires_grad(true)};
  const auto slope_of = [&](const OverTensors& call) {
    at::Tensor y;
    {
      const AutocastScope casts(at::kCPU, at::kBFloat16);
      y = call(leaves)[0];
    }
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    const at::Tensor slope = grad({y.sum()}, {leaves[0]}, {}, true, true)[0];
    return grad({slope.pow(2).sum()}, {leaves[1]})[0];
  };
  const CacheFolder folder;
  for (const std::size_t loaded : {0u, 1u}) {
    Compiled compiled(over_tensors(function), folder.options());
    EXPECT_TRUE(torch::equal(
        slope_of([&](const Tensors& in) { return Tensors{compiled(values_of(in))[0].toTensor()}; }),
        slope_of(function)));
    EXPECT_EQ(compiled.loaded(), loaded);
  }
}

// A capture for all sizes, whose views and lazy inputs are made again.
TEST(SecondDerivatives, OfLoadedCallsForAllSizes) {
  torch::manual_seed(6);
  const OverTensors function = [](const Tensors& in) {
    return Tensors{(in[0].t().mm(in[0]) * in[1]).tanh() / in[0].size(0)};
  };
  const CacheFolder folder;
  CompileOptions options = folder.options();
  options.dynamic.dims = {{0, 0, "B"}};
  for (const std::size_t loaded : {0u, 1u}) {
    Compiled compiled(over_tensors(function), options);
    for (const std::int64_t size : {5, 3}) {
      const Tensors leaves{wide({size, 2}), wide({2, 2})};
      const auto expected = derivatives(function, leaves),
                 actual = derivatives(
                     [&](const Tensors&in) { return Tensors{compiled(values_of(in))[0].toTensor()}; },
                     leaves);
      for (std::size_t order = 0; order < expected.size(); ++order)
        for (std::size_t i = 0; i < leaves.size(); ++i)
          EXPECT_TRUE(torch::allclose(actual[order][i], expected[order][i], 1e-9, 1e-10))
              << "order " << order << ", leaf " << i;
    }
    EXPECT_EQ(compiled.loaded(), loaded) << compiled.cache_counts().text();
    EXPECT_TRUE(compiled.is_dynamic(0)) << compiled.why_not_dynamic();
  }
}

TEST(SecondDerivatives, OfALoadedCallWithALazyInput) {
  const CacheFolder folder;
  const OverTensors function = [](const Tensors& in) { return Tensors{at::real(in[0] * in[0] * in[1])}; };
  torch::manual_seed(7);
  const Tensors leaves{torch::randn({3}, at::kComplexDouble).set_requires_grad(true),
                       torch::randn({3}, at::kComplexDouble).set_requires_grad(true)};
  const auto of = [&](const OverTensors& call) {
    return derivatives([&](const Tensors& in) { return call({in[0].conj(), in[1]}); }, leaves, 1);
  };
  const auto second = [&](const OverTensors& call) {
    const at::Tensor lazy = leaves[0].conj();
    const at::Tensor y = call({lazy, leaves[1]})[0].sum();
    const at::Tensor slope = grad({y}, {leaves[0]}, {}, true, true)[0];
    return grad({at::real(slope * slope).sum()}, {leaves[1]})[0];
  };
  const std::vector<Tensors> expected = of(function);
  const at::Tensor expected_second = second(function);
  for (const std::size_t loaded : {0u, 1u}) {
    Compiled compiled(over_tensors(function), folder.options());
    const OverTensors call = [&](const Tensors& in) {
      return Tensors{compiled(values_of(in))[0].toTensor()};
    };
    EXPECT_TRUE(torch::allclose(of(call)[0][0], expected[0][0]));
    EXPECT_TRUE(torch::allclose(second(call), expected_second));
    EXPECT_EQ(compiled.loaded(), loaded) << compiled.cache_counts().text();
    EXPECT_EQ(compiled.wrappers(0).front(), "lazy inputs");
  }
}

std::string refusal_of(const OverTensors& function, const Tensors& inputs,
                       const CompileOptions& options = {}) {
  Compiled compiled(over_tensors(function), options);
  const at::Tensor y = compiled(values_of(inputs))[0].toTensor().sum();
  try {
    grad({y}, {inputs[0]}, {}, true, true);
  } catch (const NotImplemented& error) {
    return error.what();
  }
  return "it was differentiated";
}

TEST(SecondDerivatives, RefusedWhereTheFunctionWouldDoSomethingElse) {
  EXPECT_TRUE(has_text(refusal_of(
                           [](const Tensors& in) {
                             in[1].add_(1);
                             return Tensors{in[0] * in[1]};
                           },
                           {leaf({3}), torch::ones({3})}),
                       "it writes input 1"));
  // The reason is stored with the call.
  const CacheFolder folder;
  for (int run = 0; run < 2; ++run)
    EXPECT_TRUE(has_text(refusal_of(
                             [](const Tensors& in) {
                               in[1].add_(1);
                               return Tensors{in[0] * in[1]};
                             },
                             {leaf({3}), torch::ones({3})}, folder.options()),
                         "it writes input 1"));
  EXPECT_TRUE(has_text(
      refusal_of([](const Tensors& in) { return Tensors{torch::dropout(in[0], 0.5, true)}; }, {leaf({3})}),
      "draws random numbers (aten::"));
  EXPECT_TRUE(has_text(refusal_of([](const Tensors& in) { return Tensors{in[0].sin()}; }, {leaf({3})},
                                  {.second_derivatives = SecondDerivatives::Refuse}),
                       "cannot be differentiated"));
}

// What backward does not need is not kept alive for a second derivative, unless that is asked for.
TEST(SecondDerivatives, InputsThatNobodyHolds) {
  const OverTensors function = [](const Tensors& in) { return Tensors{in[0] * 2 + in[1].exp()}; };
  const auto slope = [&](SecondDerivatives how) {
    Compiled compiled(over_tensors(function), {.second_derivatives = how});
    const at::Tensor x = leaf({3}), other = leaf({3});
    const at::Tensor y = compiled({x.sin(), other})[0].toTensor().sum();  // in[0] is freed here
    return grad({y}, {x}, {}, true, true)[0];
  };
  EXPECT_TRUE(has_text(message_of<StateError>([&] { slope(SecondDerivatives::RunAgain); }),
                       "input 0 is needed to differentiate"));
  EXPECT_TRUE(slope(SecondDerivatives::RunAgainKeepingInputs).requires_grad());
}

TEST(SecondDerivatives, InputsThatWereWrittenSinceForward) {
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0] + in[1].sum()}; }));
  const at::Tensor x = leaf({3}), other = torch::ones({3});
  const at::Tensor y = compiled({x, other})[0].toTensor().sum();
  other.add_(1);
  EXPECT_TRUE(has_text(message_of<StateError>([&] { grad({y}, {x}, {}, true, true); }),
                       "input 1 was modified by an inplace operation"));
  EXPECT_TRUE(torch::equal(grad({y}, {x})[0], torch::ones({3})));  // the first derivative does not need it
}

TEST(SecondDerivatives, AFunctionThatDoesSomethingElse) {
  int runs = 0;
  Compiled compiled(over_tensors(
      [&](const Tensors& in) { return Tensors{++runs > 1 ? in[0].narrow(0, 0, 1).sin() : in[0].sin()}; }));
  const at::Tensor x = leaf({3});
  const at::Tensor y = compiled({x})[0].toTensor().sum();
  EXPECT_TRUE(has_text(message_of<StateError>([&] { grad({y}, {x}, {}, true, true); }),
                       "result 0 of the captured function is another one"));
}

}  // namespace second_derivatives_test
}  // namespace penstock::graph
