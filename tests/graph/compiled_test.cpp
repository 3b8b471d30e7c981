#include "penstock/graph/run/compiled.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/random_program.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace compiled_test {

using test::has_text;
using test::message_of;

// Expects the results, mutated inputs and gradients of the function itself, bit for bit; captured and
// replayed.
void expect_exact(
    const std::function<Tensors(const Tensors&)>& function, const Tensors& leaves,
    const std::function<Tensors(const Tensors&)>& prepare = [](const Tensors& fresh) { return fresh; },
    Compare gradients = Compare::Exactly) {
  const Trace expected = trace_of(over_tensors(function), leaves, prepare);
  for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
    Compiled compiled(over_tensors(function), {.partitioner = partitioner});
    for (int call = 0; call < 2; ++call) {
      SCOPED_TRACE(std::string(call == 0 ? "captured" : "replayed") +
                   (partitioner == Partitioner::MinCut ? ", cut by cost" : ""));
      const Trace actual = trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, prepare);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same(actual.inputs, expected.inputs, "input");
      expect_same(actual.gradients, expected.gradients, "gradient", gradients);
    }
    EXPECT_EQ(compiled.captures(), 1u);
    EXPECT_EQ(count_writes(compiled.joint(0).graph), 0u) << to_text(compiled.joint(0).graph);
  }
}

TEST(Compiled, Mlp) {
  torch::manual_seed(1);
  expect_exact(
      [](const Tensors& in) {
        return Tensors{
            torch::linear(torch::gelu(torch::linear(in[0], in[1], in[2])), in[3], in[4]).pow(2).mean()};
      },
      {leaf({5, 4}, false), leaf({8, 4}), leaf({8}), leaf({3, 8}), leaf({3})});
}

TEST(Compiled, AttentionWithDropout) {
  torch::manual_seed(2);
  expect_exact(
      [](const Tensors& in) {
        const auto heads = [](const at::Tensor& x) { return x.view({2, 6, 2, 4}).transpose(1, 2); };
        const at::Tensor q = heads(torch::linear(in[0], in[1])), k = heads(torch::linear(in[0], in[2])),
                         v = heads(torch::linear(in[0], in[3]));
        at::Tensor scores = q.matmul(k.transpose(-1, -2)).div_(2.0);
        scores.masked_fill_(torch::ones({6, 6}, torch::kBool).triu(1), -1e9);
        const at::Tensor attention = torch::dropout(scores.softmax(-1), 0.1, true);
        return Tensors{
            torch::layer_norm(attention.matmul(v).transpose(1, 2).reshape({2, 6, 8}), {8}, in[4], in[5])};
      },
      {leaf({2, 6, 8}), leaf({8, 8}), leaf({8, 8}), leaf({8, 8}), leaf({8}), leaf({8})});
}

TEST(Compiled, ConvolutionBatchNormPooling) {
  torch::manual_seed(3);
  expect_exact(
      [](const Tensors& in) {
        at::Tensor x = torch::conv2d(in[0], in[1], in[2], 1, 1);
        x = torch::batch_norm(x, in[3], in[4], in[5], in[6], /*training=*/true, 0.1, 1e-5, false).relu_();
        return Tensors{torch::max_pool2d(x, 2).flatten(1), torch::adaptive_avg_pool2d(x, {1, 1})};
      },
      {leaf({2, 3, 8, 8}), leaf({4, 3, 3, 3}), leaf({4}), leaf({4}), leaf({4}), leaf({4}, false),
       torch::ones({4})});
}

TEST(Compiled, EmbeddingIndexAndCrossEntropy) {
  torch::manual_seed(4);
  const at::Tensor tokens = torch::randint(0, 11, {2, 5});
  expect_exact(
      [](const Tensors& in) {
        const at::Tensor hidden = torch::embedding(in[1], in[0]).cumsum(1).index({in[0].remainder(2)});
        return Tensors{torch::cross_entropy_loss(torch::linear(hidden, in[1]).view({-1, 11}),
                                                 torch::arange(50).remainder(11))};
      },
      {tokens, leaf({11, 4})});
}

TEST(Compiled, Lstm) {
  torch::manual_seed(5);
  expect_exact(
      [](const Tensors& in) {
        auto [output, hidden, cell] =
            torch::lstm(in[0], {in[1], in[2]}, {in[3], in[4], in[5], in[6]}, true, 1, 0.0, true, false, true);
        return Tensors{output, hidden, cell};
      },
      {leaf({2, 3, 4}), leaf({1, 2, 5}), leaf({1, 2, 5}), leaf({20, 4}), leaf({20, 5}), leaf({20}),
       leaf({20})});
}

TEST(Compiled, WritesThroughViewsOfInputs) {
  torch::manual_seed(6);
  expect_exact(
      [](const Tensors& in) {
        in[0].select(0, 1).mul_(3);
        in[0].t().slice(0, 0, 4, 2).add_(in[1]);
        in[0].view(-1).narrow(0, 2, 3).copy_(in[0].view(-1).narrow(0, 6, 3));
        return Tensors{in[0] * 2, in[0].select(1, 0)};
      },
      {leaf({3, 4}), leaf({3})}, cloned);
}

TEST(Compiled, WritesOfInputsThatAreViewsWithGaps) {
  torch::manual_seed(7);
  const auto every_other_column = [](const Tensors& fresh) {
    return Tensors{fresh[0].clone().slice(1, 1, 6, 2)};
  };
  expect_exact(
      [](const Tensors& in) {
        in[0].select(1, 0).mul_(2);
        at::Tensor row = in[0].select(0, 1);
        row.exp_();
        return Tensors{in[0].sum(), row * 3};
      },
      {leaf({3, 6})}, every_other_column);
}

TEST(Compiled, OverlappingInputs) {
  torch::manual_seed(8);
  const auto overlapping = [](const Tensors& fresh) {
    const at::Tensor base = fresh[0].clone();
    return Tensors{base.slice(0, 0, 2), base.slice(0, 1, 3), base.view(-1).slice(0, 1)};
  };
  expect_exact(
      [](const Tensors& in) {
        in[0].mul_(2);
        return Tensors{in[0] * in[1], in[2].slice(0, 1)};
      },
      // The gradients of the three are summed in a different order.
      {leaf({3, 4})}, overlapping, Compare::Closely);
  expect_exact(
      [](const Tensors& in) {
        in[0].mul_(2);
        return Tensors{in[0] * in[1]};
      },
      {leaf({3, 4}, false)}, overlapping);
}

TEST(Compiled, DisjointViewsOneOfWhichIsWritten) {
  torch::manual_seed(9);
  expect_exact(
      [](const Tensors& in) {
        in[0].mul_(2);
        return Tensors{in[0] * in[1].exp()};
      },
      {leaf({3, 4})},
      [](const Tensors& fresh) {
        const at::Tensor base = fresh[0].clone();
        return Tensors{base.select(0, 0), base.select(0, 1)};
      });
}

TEST(Compiled, AnInputThatIsSavedAndThenWritten) {
  torch::manual_seed(10);
  expect_exact(
      [](const Tensors& in) {
        in[0].pow_(3);
        return Tensors{in[0].sin()};
      },
      {leaf({3, 4})}, cloned);
}

TEST(Compiled, MetadataOfInputs) {
  torch::manual_seed(11);
  expect_exact(
      [](const Tensors& in) {
        in[0].mul_(2);
        in[0].t_();
        in[0].unsqueeze_(0);
        return Tensors{in[0].sin(), in[0].squeeze(0)};
      },
      {leaf({3, 4})}, cloned);
}

TEST(Compiled, TheSameTensorTwice) {
  torch::manual_seed(13);
  const auto twice = [](const Tensors& fresh) {
    const at::Tensor input = fresh[0].clone();
    return Tensors{input, input};
  };
  expect_exact([](const Tensors& in) { return Tensors{in[0] * in[1]}; }, {leaf({3, 4})}, twice);
  expect_exact(
      [](const Tensors& in) {
        in[0].mul_(2);
        return Tensors{in[0] * in[1], in[1]};
      },
      {leaf({3, 4})}, twice);
  // Transposed and transposed back through its two names.
  expect_exact(
      [](const Tensors& in) {
        in[0].t_();
        in[1].t_();
        return Tensors{in[0].relu()};
      },
      {leaf({3, 4})}, twice);
}

TEST(Compiled, AnInputsMemoryWithAnotherGradientIsRefused) {
  Compiled compiled(over_tensors([](const Tensors& in) {
    const at::Tensor memory = in[0].detach();
    memory.copy_(in[0].neg());
    return Tensors{memory};
  }));
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { compiled({leaf({3}).clone()}); }), "return a clone"));
}

TEST(Compiled, OutParametersAndForeach) {
  torch::manual_seed(12);
  expect_exact(
      [](const Tensors& in) {
        at::Tensor sum = torch::empty({3, 4});
        at::add_out(sum, in[0], in[1]);
        at::Tensor a = in[0] * 1, b = in[1] * 1;
        at::_foreach_mul_({a, b}, 3.0);
        return Tensors{sum, a, b};
      },
      {leaf({3, 4}, false), leaf({3, 4}, false)});
}

// Into memory by columns, where some BLAS round otherwise than by rows.
TEST(Compiled, ProductsWrittenByColumns) {
  torch::manual_seed(13);
  for (const std::int64_t n : {2, 9, 16, 23})
    expect_exact(
        [n](const Tensors& in) {
          at::Tensor product = torch::empty({n, n + 1}, in[0].options()).t();
          at::mm_out(product, in[0], in[1]);
          at::Tensor sum = torch::ones({n, n + 1}, in[0].options()).t();
          sum.addmm_(in[0], in[1], 0.5, 0.25);
          at::Tensor batches = torch::ones({2, n, n + 1}, in[0].options()).transpose(1, 2);
          batches.baddbmm_(in[0].expand({2, n + 1, 3 * n}), in[1].expand({2, 3 * n, n}), 0.5, 2);
          return Tensors{product, sum, batches};
        },
        {torch::randn({n + 1, 3 * n}, at::kDouble), torch::randn({3 * n, n}, at::kDouble)});
}

TEST(Compiled, AProductIntoATensorOfAnotherShapeIsRefused) {
  Compiled compiled([](const Values& in) {
    at::Tensor product = torch::empty({0});
    at::mm_out(product, in[0].toTensor(), in[0].toTensor());
    return Values{product};
  });
  EXPECT_TRUE(has_text(message_of<NotImplemented>([&] { compiled({torch::randn({3, 3})}); }), "shape"));
}

TEST(Compiled, RandomOperatorsWrittenInPlace) {
  expect_exact(
      [](const Tensors& in) {
        const at::Tensor noise = torch::empty_like(in[0]).normal_(0, 2),
                         mask = torch::empty_like(in[0]).bernoulli_(0.5),
                         flat = torch::zeros_like(in[0]).uniform_(1, 2);
        return Tensors{in[0] * noise + mask * flat};
      },
      {leaf({3, 4})});
}

TEST(Compiled, RandomProgramsOfViewsAndWrites) {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  const unsigned programs = asked ? static_cast<unsigned>(std::stoul(asked)) : 400;
  unsigned compared = 0;
  for (unsigned seed = 0; seed < programs; ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    torch::manual_seed(seed);
    const Tensors leaves{torch::randint(-4, 5, {3, 4}).to(at::kFloat).set_requires_grad(true),
                         torch::randint(-4, 5, {3, 4}).to(at::kFloat).set_requires_grad(seed % 3 != 0),
                         torch::randint(-4, 5, {4}).to(at::kFloat).set_requires_grad(seed % 2 == 0)};
    // Every fourth one has inputs that share memory.
    const auto prepare = [&](const Tensors& fresh) {
      Tensors inputs = cloned(fresh);
      if (seed % 4 == 1) inputs.push_back(inputs[0].slice(0, 1));
      if (seed % 4 == 2) inputs.push_back(inputs[1]);
      return inputs;
    };
    const Function function = over_tensors([&](const Tensors& in) { return random_program(seed, in); });
    Trace expected;
    try {
      expected = trace_of(function, leaves, prepare);
    } catch (const c10::Error&) {
      continue;  // not a legal program
    }
    try {
      Compiled compiled(function, {.partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default});
      for (int call = 0; call < 2; ++call) {
        const Trace actual =
            trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, prepare);
        expect_same(actual.outputs, expected.outputs, "output");
        expect_same(actual.inputs, expected.inputs, "input");
        if (!expected.refused) {
          EXPECT_FALSE(actual.refused);
          expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
        }
      }
      EXPECT_EQ(count_writes(compiled.joint(0).graph), 0u);
      ++compared;
      if (::testing::Test::HasFailure())
        ADD_FAILURE() << "the program, as it is written: "
                      << to_text(capture_forward(function, values_of(prepare(cloned(leaves)))))
                      << "and its graph: " << to_text(compiled.joint(0).graph);
    } catch (const NotImplemented&) {
      // A known limitation; the number of cases is bounded below.
    } catch (const std::exception& error) {
      // A function whose own backward throws cannot be captured.
      if (!expected.refused)
        ADD_FAILURE() << error.what() << "\nthe program: "
                      << to_text(capture_forward(function, values_of(prepare(cloned(leaves)))));
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(compared * 10, programs * 4) << "of " << programs << " programs";
}

TEST(Compiled, AnotherCallIsCapturedAgainOrRefused) {
  const Function function =
      over_tensors([](const Tensors& in) { return Tensors{in[0].relu() * in[0].size(0)}; });
  Compiled again(function);
  EXPECT_TRUE(torch::equal(again({torch::ones({2})})[0].toTensor(), torch::full({2}, 2.)));
  EXPECT_TRUE(torch::equal(again({torch::ones({3})})[0].toTensor(), torch::full({3}, 3.)));
  EXPECT_TRUE(torch::equal(again({torch::ones({2})})[0].toTensor(), torch::full({2}, 2.)));
  EXPECT_EQ(again.captures(), 2u);

  Compiled once(function, {.recapture = false});
  once({torch::ones({2})});
  const auto refusal = [&](const at::Tensor& input) {
    return message_of<StateError>([&] { once({input}); });
  };
  EXPECT_TRUE(has_text(refusal(torch::ones({3})), "input 0 has sizes [3], in the capture [2]"));
  EXPECT_TRUE(has_text(refusal(torch::ones({2}, torch::kDouble)), "dtype Double"));
  EXPECT_TRUE(has_text(refusal(torch::ones({4}).slice(0, 0, 4, 2)), "strides [2]"));
  EXPECT_TRUE(has_text(refusal(torch::ones({2}).set_requires_grad(true)), "requires a gradient"));
  {
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(has_text(refusal(torch::ones({2})), "grad mode is not on, in the capture it is"));
  }
  {
    const AutocastScope casts(at::kCPU, at::kBFloat16);
    EXPECT_TRUE(has_text(refusal(torch::ones({2})),
                         "autocast is cpu BFloat16, cuda off, in the capture cpu off, cuda off"));
  }
  at::globalContext().setDeterministicAlgorithms(true, false);
  const std::string deterministic = refusal(torch::ones({2}));
  at::globalContext().setDeterministicAlgorithms(false, false);
  EXPECT_TRUE(has_text(deterministic, "deterministic algorithms is on, in the capture not")) << deterministic;
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const std::string dtype = refusal(torch::ones({2}, torch::kFloat));
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  EXPECT_TRUE(has_text(dtype, "the default dtype is Double, in the capture Float")) << dtype;
  once({torch::ones({2})});

  Compiled of_leaf(function, {.recapture = false});
  const at::Tensor leaf = torch::ones({2}).set_requires_grad(true);
  of_leaf({leaf});
  EXPECT_TRUE(has_text(message_of<StateError>([&] { of_leaf({leaf * 2}); }),
                       "input 0 is not a leaf, in the capture it is"));
}

// Folded constants have the default dtype of the capture.
TEST(Compiled, AnotherDefaultDtypeIsAnotherCall) {
  const Function function =
      over_tensors([](const Tensors& in) { return Tensors{in[0] + torch::ones({2}) / 3}; });
  Compiled compiled(function);
  const at::Tensor x = torch::ones({2}, torch::kDouble);
  const at::Tensor in_float = compiled({x})[0].toTensor();
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const at::Tensor in_double = compiled({x})[0].toTensor(), expected = function({x})[0].toTensor();
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  EXPECT_TRUE(torch::equal(in_double, expected));
  EXPECT_TRUE(torch::equal(in_float, function({x})[0].toTensor()));
  EXPECT_FALSE(torch::equal(in_float, in_double)) << "the test would not notice";
  EXPECT_EQ(compiled.captures(), 2u);
}

TEST(Compiled, BackwardTwiceIsAnError) {
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0].sin().exp()}; }));
  const at::Tensor x = leaf({3});
  const at::Tensor loss = compiled({x})[0].toTensor().sum();
  loss.backward();
  EXPECT_TRUE(has_text(message_of<c10::Error>([&] { loss.backward(); }), "second time"));
}

// The rejected backward would have released the graph; the next one retains it.
TEST(Compiled, ARejectedBackwardCanBeRetried) {
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0].sin().exp()}; }));
  const at::Tensor x = leaf({3});
  const at::Tensor y = compiled({x})[0].toTensor(), ones = torch::ones_like(y);
  at::globalContext().setDeterministicAlgorithms(true, false);
  const std::string rejected = message_of<StateError>([&] { y.backward(ones); });
  at::globalContext().setDeterministicAlgorithms(false, false);
  EXPECT_TRUE(has_text(rejected, "deterministic algorithms are enabled in backward"));
  const at::Tensor expected = x.detach().cos() * x.detach().sin().exp();
  y.backward(ones, /*retain_graph=*/true);
  EXPECT_TRUE(torch::allclose(x.grad(), expected));
  y.backward(ones);
  EXPECT_TRUE(torch::allclose(x.grad(), 2 * expected));
  EXPECT_TRUE(has_text(message_of<c10::Error>([&] { y.backward(ones); }), "second time"));
}

TEST(Compiled, ASavedTensorWrittenBeforeBackwardIsAnError) {
  const auto modified = [](const std::function<Tensors(const Tensors&)>& function, bool write_input) {
    Compiled compiled(over_tensors(function));
    const at::Tensor w = leaf({4, 4});
    const at::Tensor x = leaf({4, 4}, false);
    const at::Tensor output = compiled({x, w})[0].toTensor();
    const at::Tensor loss = output.sum();
    {
      const at::NoGradGuard no_grad;
      (write_input ? x : output).mul_(2);
    }
    return message_of<c10::Error>([&] { loss.backward(); });
  };
  EXPECT_TRUE(has_text(modified([](const Tensors& in) { return Tensors{in[0] * in[1]}; }, true),
                       "modified by an inplace operation"));
  EXPECT_TRUE(has_text(modified([](const Tensors& in) { return Tensors{in[0].t().mm(in[1])}; }, true),
                       "modified by an inplace operation"));
  EXPECT_TRUE(has_text(modified([](const Tensors& in) { return Tensors{(in[0] * in[1]).exp()}; }, false),
                       "modified by an inplace operation"));
}

TEST(Compiled, GradientsOfAnotherLayout) {
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0].view({2, 6}).sin()}; }));
  const at::Tensor x = leaf({3, 4});
  const at::Tensor output = compiled({x})[0].toTensor();
  const at::Tensor gradient = torch::randn({6, 2}).t();
  output.backward(gradient);
  EXPECT_TRUE(torch::equal(x.grad(), (gradient * x.detach().view({2, 6}).cos()).reshape({3, 4})));
}

TEST(Compiled, WritingWhatIsNotAnInputIsAnError) {
  const at::Tensor outside = torch::ones({3});
  Compiled compiled(over_tensors([&](const Tensors& in) {
    outside.add_(in[0]);
    return Tensors{outside * 2};
  }));
  EXPECT_TRUE(
      has_text(message_of<StateError>([&] { compiled({torch::ones({3})}); }), "pass the tensor as an input"));
  EXPECT_TRUE(torch::equal(outside, torch::ones({3})));
}

TEST(Functionalize, Siblings) {
  const auto sibling = [](const char* name, const char* overload) {
    const auto found = functional_counterpart(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
    return found ? c10::toString(found->operator_name()) : std::string("none");
  };
  EXPECT_EQ(sibling("aten::mul_", "Tensor"), "aten::mul.Tensor");
  EXPECT_EQ(sibling("aten::add", "out"), "aten::add.Tensor");
  EXPECT_EQ(sibling("aten::copy_", ""), "penstock::copy_functional");
  EXPECT_EQ(sibling("aten::zero_", ""), "aten::zero");
  EXPECT_EQ(sibling("aten::bernoulli_", "float"), "aten::bernoulli.p");
  EXPECT_EQ(sibling("aten::normal_", ""), "aten::normal_functional");
  EXPECT_EQ(sibling("aten::_foreach_mul_", "Scalar"), "aten::_foreach_mul.Scalar");
}

}  // namespace compiled_test
}  // namespace penstock::graph
