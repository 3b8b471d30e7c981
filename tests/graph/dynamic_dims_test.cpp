// Captures that are valid for all sizes of some dims.
#include "penstock/compile_options.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/rewrite.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/graph/run/generalize.h"
#include "penstock/graph/tools/graph_file.h"
#include "penstock/graph_pass.h"
#include "penstock/mode.h"
#include "penstock/transformer.h"
#include "tests/graph/call_trace.h"
#include "tests/graph/random_program.h"
#include "tests/has_text.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace dynamic_dims_test {

namespace nn = torch::nn;
using penstock::test::has_text;
using penstock::test::message_of;

using Tensorwise = std::function<Tensors(const Tensors&)>;
using Sizes = std::vector<std::int64_t>;
using Maker = std::function<Tensors(const Sizes&)>;  // inputs for given sizes of the symbols
using Prepare = std::function<Tensors(const Tensors&)>;

const Prepare as_they_are = [](const Tensors& fresh) { return fresh; };

const DynamicOptions over_batch{.dims = {{0, 0, "B"}}};
const DynamicOptions over_batch_and_length{.dims = {{0, 0, "B"}, {0, 1, "T"}}};

// If a tensor is used for several results, gradients are summed in a different order: they are then close to
// those of the function, and equal to those of a capture at the same sizes.
void expect_same_trace(const Trace& actual, const Trace& expected, Compare gradients = Compare::Exactly) {
  expect_same(actual.outputs, expected.outputs, "output");
  expect_same(actual.inputs, expected.inputs, "input");
  expect_same(actual.gradients, expected.gradients, "gradient", gradients);
  for (std::size_t i = 0; i < actual.outputs.size() && i < expected.outputs.size(); ++i)
    EXPECT_EQ(actual.outputs[i].strides(), expected.outputs[i].strides()) << "output " << i;
}

// The metadata of the graph for all sizes matches that of a capture at one size.
void expect_bound_is_captured(const Compiled& compiled, const Function& function, const Tensors& inputs,
                              const Sizes& sizes) {
  Compiled fixed(function,
                 {.disable_passes = graph_pass_names()});  // those of a capture for all sizes run on halves
  fixed(values_of(inputs));
  EXPECT_EQ(to_text(bind(compiled.joint(0), sizes).graph), to_text(fixed.joint(0).graph));
  EXPECT_TRUE(
      bind(compiled.meta(0), *compiled.joint(0).graph.table, sizes).same_in_every_field(fixed.meta(0)));
}

// Expects the results of the function bit for bit at all sizes, starting with the sizes of the first call,
// with one capture.
void expect_one_capture(const Tensorwise& function, const Maker& make, const DynamicOptions& dynamic,
                        const std::vector<Sizes>& all_sizes, const Prepare& prepare = as_they_are,
                        Compare gradients = Compare::Exactly) {
  for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
    SCOPED_TRACE(partitioner == Partitioner::MinCut ? "cut by cost" : "cut by the default rule");
    Compiled compiled(over_tensors(function), {.partitioner = partitioner, .dynamic = dynamic});
    for (int round = 0; round < 2; ++round)
      for (const Sizes& sizes : all_sizes) {
        SCOPED_TRACE(testing::Message() << "sizes " << testing::PrintToString(sizes) << ", round " << round);
        torch::manual_seed(7);
        const Tensors leaves = make(sizes);
        const Trace expected = trace_of(over_tensors(function), leaves, prepare);
        const Trace actual =
            trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, prepare);
        expect_same_trace(actual, expected, gradients);
        Compiled fixed(over_tensors(function), {.partitioner = partitioner});
        expect_same_trace(actual,
                          trace_of([&](const Values& inputs) { return fixed(inputs); }, leaves, prepare));
      }
    EXPECT_EQ(compiled.captures(), 1u) << compiled.why_not_dynamic();
    ASSERT_TRUE(compiled.is_dynamic(0)) << compiled.why_not_dynamic();
    EXPECT_EQ(compiled.checked_sizes(0), all_sizes.size());
    EXPECT_EQ(compiled.why_not_dynamic(), "");
    EXPECT_EQ(count_writes(compiled.joint(0).graph), 0u);
  }
}

constexpr std::int64_t kFirstTwoDims[] = {0, 1};
const at::IntArrayRef kFirstTwo(kFirstTwoDims), kSecond(kFirstTwoDims + 1, 1);

const std::vector<Sizes> kBatches{{4}, {2}, {3}, {5}, {8}, {17}, {32}};
const std::vector<Sizes> kBatchesAndLengths{{4, 6}, {2, 3}, {3, 3}, {6, 4}, {5, 16}, {16, 5}, {7, 8}};

Maker sequence(std::int64_t width = 8) {
  return [width](const Sizes& sizes) {
    return Tensors{leaf({sizes[0], sizes[1], width}), leaf({width, width})};
  };
}

// ---- operators ----

TEST(DynamicDims, Mlp) {
  expect_one_capture(
      [](const Tensors& in) {
        return Tensors{
            torch::linear(torch::gelu(torch::linear(in[0], in[1], in[2])), in[3], in[4]).pow(2).mean()};
      },
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], 4}, false), leaf({8, 4}), leaf({8}), leaf({3, 8}), leaf({3})};
      },
      over_batch, kBatches);
}

TEST(DynamicDims, ViewsAndReshapes) {
  expect_one_capture(
      [](const Tensors& in) {
        const at::Tensor& x = in[0];
        const at::Tensor rows = x.view({x.size(0) * x.size(1), x.size(2)}).mm(in[1]);
        return Tensors{rows.view({x.size(0), -1}),
                       rows.view_as(x).transpose(1, 2).reshape({x.size(0), -1}),
                       rows.reshape({-1}),
                       rows.view({-1, 2}).sum(0),
                       x.transpose(0, 1).contiguous().flatten(0, 1),
                       x.unsqueeze(0).squeeze(0).permute({2, 0, 1})};
      },
      sequence(), over_batch_and_length, kBatchesAndLengths, as_they_are, Compare::Closely);
}

TEST(DynamicDims, CatStackSliceExpand) {
  expect_one_capture(
      [](const Tensors& in) {
        const at::Tensor& x = in[0];
        const std::int64_t batch = x.size(0), length = x.size(1);
        const at::Tensor weights = in[1].unsqueeze(0).expand({batch, 8, 8});
        return Tensors{torch::cat({x, x.bmm(weights)}, 1),
                       torch::cat({x, in[1].unsqueeze(0).narrow(1, 0, 1).expand({2, length, 8})}, 0),
                       x.slice(1, 1).mul(x.slice(1, 0, length - 1)).sum(),
                       x.slice(1, 1, length, 2).sum(-1),
                       x.select(1, length - 1),
                       x.narrow(0, batch - 1, 1) + 1,
                       torch::stack({x, x * 2}, 0).repeat({1, 1, 1, 2}),
                       x.roll(1, 1),
                       x.flip(1).cumsum(1)};
      },
      sequence(), over_batch_and_length, kBatchesAndLengths, as_they_are, Compare::Closely);
}

TEST(DynamicDims, MeansAndVariances) {
  expect_one_capture(
      [](const Tensors& in) {
        const at::Tensor& x = in[0];
        const auto elements = static_cast<double>(x.numel());
        return Tensors{x.mean(),
                       x.mean(1),
                       x.mean(kFirstTwo),
                       x.var(kFirstTwo, true),
                       x.std(kSecond, true),
                       (x.matmul(in[1]).pow(2).sum() / elements),
                       x.sum() * (0.37 / elements),
                       torch::layer_norm(x, {8}),
                       x.softmax(1).norm(),
                       x.log_softmax(-1).logsumexp(1).mean()};
      },
      sequence(), over_batch_and_length, kBatchesAndLengths, as_they_are, Compare::Closely);
}

TEST(DynamicDims, Attention) {
  expect_one_capture(
      [](const Tensors& in) {
        const at::Tensor& x = in[0];
        const std::int64_t batch = x.size(0), length = x.size(1);
        const auto heads = [&](const at::Tensor& rows) {
          return rows.view({batch, length, 2, 4}).transpose(1, 2);
        };
        const at::Tensor q = heads(x.matmul(in[1])), k = heads(x.matmul(in[1].t())), v = heads(x);
        const at::Tensor mask = torch::ones({length, length}, at::kBool).tril();
        const at::Tensor positions =
            torch::arange(length, at::kFloat) / std::sqrt(static_cast<double>(length));
        const at::Tensor scores =
            (q.matmul(k.transpose(-1, -2)) / 2.0 + positions)
                .masked_fill(mask.logical_not(), -std::numeric_limits<float>::infinity());
        return Tensors{scores.softmax(-1).matmul(v).transpose(1, 2).reshape({batch, length, 8})};
      },
      sequence(), over_batch_and_length, kBatchesAndLengths);
}

TEST(DynamicDims, DropoutDrawsAsTheFunctionDoes) {
  expect_one_capture(
      [](const Tensors& in) {
        return Tensors{torch::dropout(in[0].matmul(in[1]), 0.3, true), torch::rand({in[0].size(0), 3}),
                       torch::bernoulli(torch::full({in[0].size(1)}, 0.5))};
      },
      sequence(), over_batch_and_length, kBatchesAndLengths);
}

TEST(DynamicDims, Classifier) {
  expect_one_capture(
      [](const Tensors& in) {
        const at::Tensor logits = torch::embedding(in[1], in[0]).mean(1).mm(in[2]);
        return Tensors{torch::nll_loss(logits.log_softmax(1), in[3]), logits.argmax(1)};
      },
      [](const Sizes& sizes) {
        return Tensors{torch::randint(10, {sizes[0], sizes[1]}), leaf({10, 8}), leaf({8, 3}),
                       torch::randint(3, {sizes[0]})};
      },
      {.dims = {{0, 0, "B"}, {0, 1, "T"}, {3, 0, "B"}}}, kBatchesAndLengths);
}

TEST(DynamicDims, ConvolutionsOverALengthThatTheyHalve) {
  expect_one_capture(
      [](const Tensors& in) {
        const at::Tensor once = torch::conv1d(in[0], in[1], {}, 2, 1).relu(),
                         twice = torch::conv1d(once, in[1].flip(2), {}, 2, 1);
        return Tensors{once, twice.mean(2), twice.reshape({in[0].size(0), -1}).sum(1)};
      },
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], 3, sizes[1]}), leaf({3, 3, 3})};
      },
      {.dims = {{0, 0, "B"}, {0, -1, "T"}}}, {{4, 24}, {2, 23}, {3, 30}, {5, 17}, {7, 9}, {6, 65}});
}

TEST(DynamicDims, ThreeSymbols) {
  expect_one_capture(
      [](const Tensors& in) {
        const at::Tensor both = torch::cat({in[0], in[1]}, 1);
        return Tensors{both.reshape({in[0].size(0), -1}).sum(1),
                       in[0].bmm(in[1].transpose(1, 2)).softmax(-1).mean()};
      },
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], sizes[1], 4}), leaf({sizes[0], sizes[2], 4})};
      },
      {.dims = {{0, 0, "B"}, {0, 1, "T"}, {1, 0, "B"}, {1, 1, "S"}}},
      {{3, 4, 5}, {2, 7, 3}, {6, 2, 2}, {3, 3, 3}});
}

// ---- memory ----

TEST(DynamicDims, ResultsThatAreViews) {
  expect_one_capture(
      [](const Tensors& in) {
        const at::Tensor inside = in[0].matmul(in[1]);
        return Tensors{in[0],
                       in[0].transpose(0, 1),
                       in[0].slice(1, 1),
                       in[0].select(0, in[0].size(0) - 1),
                       inside.view({-1, 8}),
                       inside.transpose(1, 2),
                       inside.select(1, 1),
                       inside.detach()};
      },
      sequence(), over_batch_and_length, kBatchesAndLengths,
      [](const Tensors& fresh) {
        return Tensors{fresh[0] * 2, fresh[1]};
      });
}

TEST(DynamicDims, InputsThatAreWritten) {
  expect_one_capture(
      [](const Tensors& in) {
        in[0].slice(1, 1).mul_(2);
        in[0].select(0, 0).add_(in[0].select(1, 0).sum());
        in[2].add_(static_cast<double>(in[0].size(0)));
        return Tensors{in[0].matmul(in[1]), in[0].view({-1})};
      },
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], sizes[1], 8}), leaf({8, 8}), leaf({3}, false)};
      },
      over_batch_and_length, kBatchesAndLengths,
      [](const Tensors& fresh) {
        return Tensors{fresh[0].clone(), fresh[1], fresh[2].clone()};
      });
}

TEST(DynamicDims, InputsWhoseShapeIsChanged) {
  expect_one_capture(
      [](const Tensors& in) {
        in[0].transpose_(0, 1);
        return Tensors{in[0].sum(0), in[0]};
      },
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], sizes[1], 3}, false)};
      },
      over_batch_and_length, kBatchesAndLengths,
      [](const Tensors& fresh) { return Tensors{fresh[0].clone()}; });
}

TEST(DynamicDims, StridedInputs) {
  const Tensorwise function = [](const Tensors& in) {
    return Tensors{in[0]
                       .view({in[0].size(0), in[0].size(1), 2, 4})
                       .sum(2, true)
                       .expand({-1, -1, 2, -1})
                       .reshape({-1, 8})
                       .mm(in[1])
                       .relu()};
  };
  const auto rows_of = [](const Sizes& sizes) { return Tensors{leaf({sizes[0] + 3, 40, 16}), leaf({8, 8})}; };
  // [T, B, 8] viewed as [B, T, 8].
  expect_one_capture(
      function,
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[1], sizes[0], 8}), leaf({8, 8})};
      },
      over_batch_and_length, kBatchesAndLengths,
      [](const Tensors& fresh) {
        return Tensors{fresh[0].transpose(0, 1), fresh[1]};
      });
  // A window of a larger tensor: gaps that do not depend on the sizes.
  for (const Sizes& first : kBatchesAndLengths) {
    std::vector<Sizes> sizes{first, {9, 7}, {2, 30}};
    Sizes current;
    expect_one_capture(
        function,
        [&](const Sizes& now) {
          current = now;
          return rows_of(now);
        },
        over_batch_and_length, sizes,
        [&](const Tensors& fresh) {
          return Tensors{fresh[0].narrow(0, 0, current[0]).narrow(1, 0, current[1]).narrow(2, 0, 8),
                         fresh[1]};
        });
  }
  // Expanded: every row is the same.
  expect_one_capture([](const Tensors& in) { return Tensors{in[0].matmul(in[1])}; },
                     [](const Sizes& sizes) {
                       return Tensors{leaf({1, sizes[1], 8}), leaf({8, 8}), torch::ones(sizes[0])};
                     },
                     over_batch_and_length, kBatchesAndLengths,
                     [](const Tensors& fresh) {
                       return Tensors{fresh[0].expand({fresh[2].size(0), -1, -1}), fresh[1]};
                     });
}

TEST(DynamicDims, ADifferentLayoutIsAnotherCapture) {
  const Tensorwise function = [](const Tensors& in) { return Tensors{in[0].reshape({-1}) * 2}; };
  Compiled compiled(over_tensors(function), {.dynamic = over_batch});
  for (const std::int64_t batch : {4, 7, 5}) {
    const at::Tensor x = torch::randn({batch, 6}), turned = torch::randn({6, batch}).t();
    EXPECT_TRUE(torch::equal(compiled({x})[0].toTensor(), x.reshape({-1}) * 2));
    EXPECT_TRUE(torch::equal(compiled({turned})[0].toTensor(), turned.reshape({-1}) * 2));
  }
  EXPECT_EQ(compiled.captures(), 2u);
  EXPECT_TRUE(compiled.is_dynamic(0) && compiled.is_dynamic(1));
}

TEST(DynamicDims, TheSameTensorTwice) {
  expect_one_capture(
      [](const Tensors& in) {
        return Tensors{in[0] * in[1], in[0].mean()};
      },
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], 3})};
      },
      {.dims = {{0, 0, "B"}, {1, 0, "B"}}}, kBatches,
      [](const Tensors& fresh) {
        return Tensors{fresh[0], fresh[0]};
      });
  expect_one_capture(
      [](const Tensors& in) {
        in[0].mul_(2);
        return Tensors{in[1] + 1};
      },
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], 3})};
      },
      {.dims = {{0, 0, "B"}, {1, 0, "B"}}}, kBatches,
      [](const Tensors& fresh) {
        const at::Tensor one = fresh[0] * 1;
        return Tensors{one, one};
      });
}

// ---- calls ----

TEST(DynamicDims, BackwardBelongsToItsOwnCall) {
  const Tensorwise function = [](const Tensors& in) {
    return Tensors{in[0].mm(in[1]).mean(), in[0].view({-1}) * 2};
  };
  Compiled compiled(over_tensors(function), {.dynamic = over_batch});
  const at::Tensor w = leaf({5, 2});
  std::vector<at::Tensor> losses, inputs;
  for (const std::int64_t batch : {4, 9, 6}) {
    inputs.push_back(leaf({batch, 5}));
    const Values results = compiled({inputs.back(), w});
    losses.push_back(results[0].toTensor() + results[1].toTensor().pow(2).sum());
  }
  for (const std::size_t i : {1u, 0u, 2u}) losses[i].backward();
  for (const at::Tensor& x : inputs) {
    const at::Tensor plain = x.detach().clone().requires_grad_();
    const Tensors results = function({plain, w.detach()});
    (results[0] + results[1].pow(2).sum()).backward();
    EXPECT_TRUE(torch::equal(x.grad(), plain.grad()));
  }
}

TEST(DynamicDims, GradientsOfAnotherLayout) {
  const Tensorwise function = [](const Tensors& in) { return Tensors{in[0].mm(in[1])}; };
  Compiled compiled(over_tensors(function), {.dynamic = over_batch});
  for (const std::int64_t batch : {4, 9, 3}) {
    const at::Tensor x = leaf({batch, 5}), w = leaf({5, 2}), gradient = torch::randn({2, batch}).t();
    compiled({x, w})[0].toTensor().backward(gradient);
    EXPECT_TRUE(torch::allclose(x.grad(), gradient.mm(w.detach().t())));
  }
  const at::Tensor x = leaf({6, 5}), w = leaf({5, 2});
  const at::Tensor y = compiled({x, w})[0].toTensor();
  EXPECT_EQ(compiled.captures(), 1u);
  EXPECT_ANY_THROW(y.backward(torch::ones({5, 2})));
}

TEST(DynamicDims, NumbersAmongTheResults) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    return {x * 2, x.size(0), 1.0 / static_cast<double>(x.size(0)), std::string("rows")};
  };
  Compiled compiled(function, {.dynamic = over_batch});
  for (const std::int64_t batch : {4, 9, 3, 1}) {
    const Values results = compiled({torch::ones({batch, 2})});
    EXPECT_EQ(results[1].toInt(), batch);
    EXPECT_EQ(results[2].toDouble(), 1.0 / static_cast<double>(batch));
    EXPECT_EQ(results[3].toStringRef(), "rows");
  }
  EXPECT_EQ(compiled.captures(), 1u);
}

TEST(DynamicDims, WithoutGradients) {
  const Tensorwise function = [](const Tensors& in) {
    return Tensors{in[0].matmul(in[1]).softmax(1).reshape({in[0].size(0), -1})};
  };
  Compiled compiled(over_tensors(function), {.dynamic = over_batch_and_length});
  const at::NoGradGuard no_grad;
  for (const Sizes& sizes : kBatchesAndLengths) {
    const Tensors inputs = sequence()(sizes);
    EXPECT_TRUE(torch::equal(compiled(values_of(inputs))[0].toTensor(), function(inputs)[0]));
  }
  EXPECT_EQ(compiled.captures(), 1u);
}

// ---- special sizes ----

// Expects correct results at all sizes, whether or not the graph for all sizes is valid for them.
void expect_right(const Tensorwise& function, const Maker& make, const DynamicOptions& dynamic,
                  const std::vector<Sizes>& all_sizes, std::size_t captures) {
  Compiled compiled(over_tensors(function), {.dynamic = dynamic});
  for (int round = 0; round < 2; ++round)
    for (const Sizes& sizes : all_sizes) {
      SCOPED_TRACE(testing::Message() << "sizes " << testing::PrintToString(sizes) << ", round " << round);
      const Tensors leaves = make(sizes);
      const Trace expected = trace_of(over_tensors(function), leaves, as_they_are);
      expect_same_trace(trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, as_they_are),
                        expected);
    }
  EXPECT_EQ(compiled.captures(), captures) << compiled.why_not_dynamic();
  EXPECT_TRUE(compiled.is_dynamic(0)) << compiled.why_not_dynamic();
}

TEST(DynamicDims, SizesZeroAndOne) {
  // Pointwise operators and products are the same at every size.
  expect_right([](const Tensors& in) { return Tensors{in[0].mm(in[1]).relu() * 2}; },
               [](const Sizes& sizes) {
                 return Tensors{leaf({sizes[0], 4}), leaf({4, 3})};
               },
               over_batch, {{4}, {1}, {0}, {3}}, 1);
  // Here the first call has the special size.
  expect_right([](const Tensors& in) { return Tensors{in[0].mm(in[1]).relu() * 2}; },
               [](const Sizes& sizes) {
                 return Tensors{leaf({sizes[0], 4}), leaf({4, 3})};
               },
               over_batch, {{1}, {4}, {3}}, 1);
}

TEST(DynamicDims, SizesThatBroadcastHaveACaptureOfTheirOwn) {
  // The gradient of a broadcast tensor is summed; for size 1 nothing is broadcast.
  const auto function = [](const Tensors& in) { return Tensors{(in[0] + in[1]).pow(2)}; };
  expect_right(
      function,
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], 4}), leaf({1, 4})};
      },
      over_batch, {{4}, {1}, {6}}, 2);
  expect_right(
      function,
      [](const Sizes& sizes) {
        return Tensors{leaf({sizes[0], 4}), leaf({1, 4})};
      },
      over_batch, {{1}, {4}, {6}}, 2);
}

TEST(DynamicDims, EverySmallSizeIsRight) {
  const auto function = [](const Tensors& in) {
    const at::Tensor& x = in[0];
    const at::Tensor y = x.matmul(in[1]).transpose(0, 1).reshape({x.size(1), -1});
    return Tensors{y.softmax(0), x.reshape({-1, 8}).mean(1), x.squeeze(0), torch::cat({x, x * 2}, 1).sum(1)};
  };
  Compiled compiled(over_tensors(function), {.dynamic = over_batch_and_length});
  for (std::int64_t batch = 4; batch >= 0; --batch)
    for (std::int64_t length = 4; length >= 1; --length) {
      SCOPED_TRACE(testing::Message() << batch << " by " << length);
      const Tensors leaves = sequence()({batch, length});
      expect_same_trace(trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, as_they_are),
                        trace_of(over_tensors(function), leaves, as_they_are), Compare::Closely);
    }
  EXPECT_TRUE(compiled.is_dynamic(0)) << compiled.why_not_dynamic();
  EXPECT_LE(compiled.captures(),
            1u + 8u + 3u);  // 0 and 1 rows of each length, and each number of rows of length 1
}

TEST(DynamicDims, CodeThatLooksAtSizes) {
  int calls = 0;
  const Tensorwise function = [&calls](const Tensors& in) {
    ++calls;
    return Tensors{in[0].size(0) >= 100 ? in[0].relu() : in[0].tanh() / static_cast<double>(in[0].size(0))};
  };
  Compiled compiled(over_tensors(function), {.dynamic = over_batch});
  for (int round = 0; round < 2; ++round)
    for (const std::int64_t batch : {4, 5, 100, 6, 200}) {
      const at::Tensor x = torch::randn({batch, 2});
      EXPECT_TRUE(torch::equal(compiled({x})[0].toTensor(), function({x})[0])) << batch;
    }
  EXPECT_EQ(compiled.captures(), 3u);
  EXPECT_TRUE(compiled.is_dynamic(0));
  EXPECT_FALSE(compiled.is_dynamic(1) || compiled.is_dynamic(2));
  const int before = calls;
  compiled({torch::randn({5, 2})});
  compiled({torch::randn({200, 2})});
  EXPECT_EQ(calls, before) << "sizes that were checked are not checked again";
}

TEST(DynamicDims, TrustedSizesAreNotChecked) {
  int calls = 0;
  const Tensorwise function = [&calls](const Tensors& in) {
    ++calls;
    return Tensors{in[0].view({-1}) * static_cast<double>(in[0].size(0))};
  };
  DynamicOptions options = over_batch;
  options.trust = true;
  Compiled compiled(over_tensors(function), {.dynamic = options});
  compiled({torch::ones({4, 3})});
  const int before = calls;
  for (const std::int64_t batch : {9, 5, 30}) {
    const at::Tensor x = torch::randn({batch, 3});
    EXPECT_TRUE(torch::equal(compiled({x})[0].toTensor(), x.view({-1}) * static_cast<double>(batch)));
  }
  EXPECT_EQ(calls, before);
  compiled({torch::ones({1, 3})});
  EXPECT_EQ(calls, before + 1) << "1 is never trusted";
}

// Includes programs that behave differently at some sizes: correct at all of them, whichever capture is used.
TEST(DynamicDims, RandomProgramsAtAllSizes) {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  const unsigned programs = asked ? static_cast<unsigned>(std::stoul(asked)) : 150;
  const std::vector<Sizes> all_sizes{{3, 4}, {2, 5}, {4, 4}, {1, 3}, {5, 1}, {6, 7}, {1, 1}, {3, 9}};
  unsigned compared = 0, served = 0;
  WarningCapture warnings;
  for (unsigned seed = 0; seed < programs; ++seed) {
    const Function function = over_tensors([&](const Tensors& in) { return random_program(seed, in); });
    Compiled compiled(
        function, {.partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default,
                   .dynamic = {.dims = {{0, 0, "B"}, {0, 1, "T"}, {1, 0, "B"}, {1, 1, "T"}, {2, 0, "T"}}}});
    for (int round = 0; round < 2; ++round)
      for (const Sizes& sizes : all_sizes) {
        SCOPED_TRACE(testing::Message() << "program " << seed << ", sizes " << testing::PrintToString(sizes)
                                        << ", round " << round);
        torch::manual_seed(seed);
        const Tensors leaves{
            torch::randint(-4, 5, {sizes[0], sizes[1]}).to(at::kFloat).set_requires_grad(true),
            torch::randint(-4, 5, {sizes[0], sizes[1]}).to(at::kFloat).set_requires_grad(seed % 3 != 0),
            torch::randint(-4, 5, {sizes[1]}).to(at::kFloat).set_requires_grad(seed % 2 == 0)};
        const Prepare prepare = [&](const Tensors& fresh) {
          Tensors inputs = cloned(fresh);
          if (seed % 4 == 2) inputs[1] = inputs[0];
          return inputs;
        };
        Trace expected;
        try {
          expected = trace_of(function, leaves, prepare);
        } catch (const c10::Error&) {
          continue;  // not legal at these sizes
        }
        try {
          const Trace actual =
              trace_of([&](const Values& inputs) { return compiled(inputs); }, leaves, prepare);
          expect_same(actual.outputs, expected.outputs, "output");
          expect_same(actual.inputs, expected.inputs, "input");
          if (!expected.refused)
            expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
          ++compared;
        } catch (const NotImplemented&) {
          // A known limitation.
        } catch (const std::exception& error) {
          if (!expected.refused) ADD_FAILURE() << error.what();
        }
        if (testing::Test::HasFailure()) return;
      }
    for (std::size_t i = 0; i < compiled.captures(); ++i)
      served += static_cast<unsigned>(compiled.checked_sizes(i));
  }
  EXPECT_GE(compared, 5 * programs);
  EXPECT_GE(served, 2 * programs) << "sizes that have no capture of their own";
}

// ---- what cannot be captured for all sizes ----

Compiled refused_function(bool recapture) {
  return Compiled(
      over_tensors([](const Tensors& in) { return Tensors{in[0] * static_cast<double>(in[0].size(0) % 3)}; }),
      {.recapture = recapture, .dynamic = over_batch});
}

TEST(DynamicDims, SizesWithoutExpressionAreCapturedSeparately) {
  Compiled compiled = refused_function(true);
  WarningCapture warnings;
  for (const std::int64_t batch : {4, 5, 4, 5})
    EXPECT_EQ(compiled({torch::ones({batch})})[0].toTensor()[0].item<float>(), static_cast<float>(batch % 3));
  EXPECT_EQ(compiled.captures(), 2u);
  EXPECT_FALSE(compiled.is_dynamic(0) || compiled.is_dynamic(1));
  EXPECT_TRUE(has_text(compiled.why_not_dynamic(), "argument 'other' of node 0 (aten::mul."));
  EXPECT_TRUE(has_text(compiled.why_not_dynamic(), "at B = 3 and "));
  ASSERT_EQ(warnings.warnings().size(), 1u);
  EXPECT_TRUE(
      has_text(warnings.warnings()[0].message, "captured separately for each size: argument 'other'"));
}

TEST(DynamicDims, SizesWithoutExpressionAreAnErrorWithoutRecapture) {
  Compiled compiled = refused_function(false);
  const std::string message = message_of<StateError>([&] { compiled({torch::ones({4})}); });
  EXPECT_TRUE(has_text(message, "cannot be captured for all sizes: argument 'other' of node 0 (aten::mul."));
  EXPECT_TRUE(has_text(message, "set recapture"));
}

TEST(DynamicDims, FunctionsThatAreNotForAllSizes) {
  const auto halves = [](const Tensors& in) { return Tensors{in[0].view({2, -1}) * 2}; };
  const auto make = [](const Sizes& sizes) { return Tensors{leaf({sizes[0]})}; };
  expect_one_capture(halves, make, over_batch, {{6}, {2}, {8}, {100}});
  Compiled compiled(over_tensors(halves), {.dynamic = over_batch});
  compiled({torch::ones({6})});
  EXPECT_ANY_THROW(compiled({torch::ones({7})}));
  EXPECT_EQ(compiled({torch::ones({10})})[0].toTensor().size(1), 5);
  EXPECT_EQ(compiled.captures(), 1u);
  // Known restrictions can be declared: the function is then not tried at other sizes.
  int odd = 0;
  const auto counted = [&](const Tensors& in) {
    odd += in[0].size(0) % 2 != 0;
    return halves(in);
  };
  expect_one_capture(counted, make, {.dims = {{.input = 0, .dim = 0, .symbol = "B", .multiple_of = 2}}},
                     {{6}, {2}, {8}, {100}});
  EXPECT_EQ(odd, 0);
}

TEST(DynamicDims, FunctionsForOneSize) {
  const auto six = [](const Tensors& in) { return Tensors{in[0].view({2, 3}) * 2}; };
  Compiled compiled(over_tensors(six), {.recapture = false, .dynamic = over_batch});
  EXPECT_TRUE(has_text(message_of<StateError>([&] { compiled({torch::ones({6})}); }),
                       "at B = 5 it throws: shape '[2, 3]' is invalid"));
}

TEST(DynamicDims, TensorsThatTheFunctionFinds) {
  const at::Tensor table = torch::randn({50, 4}), whole = torch::randn({4});
  const Tensorwise function = [&](const Tensors& in) {
    return Tensors{in[0] + table.narrow(0, 0, in[0].size(1)) * whole,
                   in[0].sum() / static_cast<double>(in[0].numel()), in[0].sum() / in[0].size(0)};
  };
  const Maker make = [](const Sizes& sizes) { return Tensors{leaf({sizes[0], sizes[1], 4})}; };
  expect_one_capture(function, make, over_batch_and_length, {{4, 6}, {3, 7}, {2, 50}, {9, 2}}, as_they_are,
                     Compare::Closely);
  // Changed since: a capture sees the change, like the function.
  Compiled compiled(over_tensors(function), {.dynamic = over_batch_and_length});
  const Tensors inputs = make({3, 5});
  compiled(values_of(inputs));
  table.add_(1);
  EXPECT_TRUE(torch::equal(compiled(values_of(inputs))[0].toTensor(), function(inputs)[0]));
  // The table ends here, and so does the graph.
  EXPECT_ANY_THROW(compiled(values_of(make({3, 51}))));
  EXPECT_EQ(compiled.captures(), 1u);
  // Created in each call, without operators.
  Compiled by_hand(over_tensors([](const Tensors& in) {
                     const std::vector<float> numbers(static_cast<std::size_t>(in[0].size(0)), 2);
                     const at::Tensor made = [&] {
                       const NoModesGuard real;
                       return torch::tensor(numbers);
                     }();
                     return Tensors{in[0] * made};
                   }),
                   {.dynamic = over_batch});
  WarningCapture warnings;
  for (const std::int64_t batch : {4, 7})
    EXPECT_EQ(by_hand({torch::ones({batch})})[0].toTensor().sum().item<float>(),
              static_cast<float>(2 * batch));
  EXPECT_TRUE(has_text(by_hand.why_not_dynamic(), "the function creates tensors of 3 and 2 elements"));
}

TEST(DynamicDims, CodeThatDoesSomethingElseAtEachSize) {
  const auto unrolled = [](const Tensors& in) {
    at::Tensor sum = in[0].select(0, 0) * 1;
    for (std::int64_t i = 1; i < in[0].size(0); ++i) sum = sum * 2 + in[0].select(0, i);
    return Tensors{sum};
  };
  Compiled compiled(over_tensors(unrolled), {.dynamic = over_batch});
  WarningCapture warnings;
  for (const std::int64_t batch : {4, 6}) {
    const at::Tensor x = torch::randn({batch, 9});
    EXPECT_TRUE(torch::equal(compiled({x})[0].toTensor(), unrolled({x})[0]));
  }
  EXPECT_EQ(compiled.captures(), 2u);
  EXPECT_TRUE(has_text(compiled.why_not_dynamic(), "it behaves differently at B = 2 than at B = 3: "));
}

TEST(DynamicDims, InputsThatShareMemory) {
  const at::Tensor memory = torch::ones({20});
  const auto adds = [](const Tensors& in) {
    in[0].add_(1);
    return Tensors{in[1] * 2};
  };
  Compiled compiled(over_tensors(adds), {.dynamic = over_batch});
  WarningCapture warnings;
  EXPECT_EQ(compiled({memory.slice(0, 0, 10), memory.slice(0, 5, 15)})[0].toTensor().sum().item<float>(), 30);
  EXPECT_FALSE(compiled.is_dynamic(0));
  EXPECT_TRUE(
      has_text(compiled.why_not_dynamic(), "input 0 has a dynamic dim and shares memory with input 1"));
}

// ---- guards and options ----

TEST(DynamicDims, GuardsNameInputAndDim) {
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0].mm(in[1]) + in[2]}; }),
                    {.recapture = false,
                     .dynamic = {.dims = {{.input = 0, .dim = 0, .symbol = "B", .max = 64}, {2, 0, "B"}}}});
  const auto call = [&](at::IntArrayRef x, at::IntArrayRef w, at::IntArrayRef c) {
    return compiled({torch::ones(x), torch::ones(w), torch::ones(c)});
  };
  call({4, 3}, {3, 2}, {4, 2});
  call({9, 3}, {3, 2}, {9, 2});
  const auto refused = [&](at::IntArrayRef x, at::IntArrayRef w, at::IntArrayRef c) {
    return message_of<StateError>([&] { call(x, w, c); });
  };
  EXPECT_TRUE(has_text(refused({5, 4}, {4, 2}, {5, 2}),
                       "input 0 has sizes [5, 4], in the capture [B, 3] with B = 5: dim 1 differs"));
  EXPECT_TRUE(has_text(refused({5, 3}, {3, 2}, {6, 2}),
                       "input 2 has sizes [6, 2], in the capture [B, 2] with B = 5: dim 0 differs"));
  EXPECT_TRUE(has_text(refused({5, 3}, {3, 7}, {5, 7}), "input 1 has sizes [3, 7], in the capture [3, 2]"));
  EXPECT_TRUE(has_text(refused({65, 3}, {3, 2}, {65, 2}), "B is 65, in the capture 0 to 64"));
  EXPECT_TRUE(has_text(message_of<StateError>([&] {
                         compiled({torch::ones({3, 5}).t(), torch::ones({3, 2}), torch::ones({5, 2})});
                       }),
                       "input 0 has strides [1, 5], in the capture [3, 1]"));
  EXPECT_TRUE(
      has_text(message_of<StateError>([&] {
                 compiled({torch::ones({5, 3}, at::kDouble), torch::ones({3, 2}), torch::ones({5, 2})});
               }),
               "input 0 has dtype Double"));
}

TEST(DynamicDims, SizesThatDifferAreAnErrorWithoutRecapture) {
  Compiled compiled(over_tensors([](const Tensors& in) {
                      return Tensors{in[0].size(0) >= 100 ? in[0].relu() : in[0].tanh()};
                    }),
                    {.recapture = false, .dynamic = over_batch});
  compiled({torch::ones({4})});
  EXPECT_TRUE(has_text(message_of<StateError>([&] { compiled({torch::ones({100})}); }),
                       "is not valid for B = 100: there node 0 is aten::tanh and aten::relu"));
  compiled({torch::ones({5})});
}

TEST(DynamicDims, RangesGiveOtherSizesTheirOwnCapture) {
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0] * 2}; }),
                    {.dynamic = {.dims = {{.input = 0, .dim = 0, .symbol = "B", .min = 2, .max = 8}}}});
  for (const std::int64_t batch : {4, 9, 8, 2, 1}) compiled({torch::ones({batch})});
  EXPECT_EQ(compiled.captures(), 3u);
  EXPECT_EQ(compiled.checked_sizes(0), 3u);
}

TEST(DynamicDims, OptionsThatFitNoInput) {
  const auto refused = [](DynamicDim dim, at::IntArrayRef sizes = {4, 3}) {
    Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0] * 2}; }),
                      {.dynamic = {.dims = {dim, {0, 1, "T"}}}});
    return message_of<ValueError>([&] { compiled({torch::ones(sizes)}); });
  };
  EXPECT_TRUE(has_text(refused({1, 0}), "input of a dynamic dim: got 1, expected one of 0 to 0"));
  EXPECT_TRUE(has_text(refused({-1, 0}), "input of a dynamic dim: got -1, expected one of 0 to 0"));
  EXPECT_TRUE(has_text(refused({"x", 0}),
                       "input 'x', which this function does not have; it has inputs without names"));
  EXPECT_TRUE(has_text(refused({0, 2}), "a dynamic dim of input 0: got 2, expected a dim of sizes [4, 3]"));
  EXPECT_TRUE(has_text(refused({0, 0, "T"}),
                       "dim 1 of input 0 has size 3, and dim 0 of input 0 has size 4, but both are T"));
  EXPECT_TRUE(has_text(refused({.input = 0, .dim = 0, .symbol = "B", .min = 5, .max = 4}),
                       "symbol B must be at least 5 and at most 4"));
  EXPECT_TRUE(has_text(refused({.input = 0, .dim = 0, .symbol = "B", .multiple_of = 0}),
                       "multiple_of for input 0: got 0"));
  DynamicOptions many;
  for (int i = 0; i < 5; ++i) many.dims.push_back({0, i});
  Compiled compiled(over_tensors([](const Tensors& in) { return Tensors{in[0] * 2}; }), {.dynamic = many});
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         compiled({torch::ones({2, 3, 4, 5, 6})});
                       }),
                       "number of symbols of dynamic dims: got 5, expected at most 4"));
}

TEST(DynamicDims, SamplesAreNearAndDistinct) {
  const Values inputs{torch::ones({6, 5, 4}), torch::ones({4, 7})};
  const auto symbols = symbols_of(over_batch_and_length, inputs, {});
  const auto samples = sample_sizes(inputs, symbols, {6, 5});
  EXPECT_GE(samples.size(), 10u);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    EXPECT_NE(samples[i][0], samples[i][1]);
    EXPECT_EQ(std::count(samples.begin(), samples.end(), samples[i]), 1);
    for (const std::int64_t size : samples[i]) {
      EXPECT_GT(size, 1);
      EXPECT_LT(size, 20);
      for (const std::int64_t taken : {6, 5, 4, 7}) EXPECT_NE(size, taken);
    }
  }
  // If a range leaves too few sizes, those of other dims are used as well.
  const auto narrow =
      symbols_of({.dims = {{.input = 0, .dim = 0, .symbol = "B", .min = 4, .max = 7}}}, inputs, {});
  EXPECT_EQ(sample_sizes(inputs, narrow, {6}), (std::vector<SymbolValues>{{5}, {4}, {7}}));
  const auto fixed =
      symbols_of({.dims = {{.input = 0, .dim = 0, .symbol = "B", .min = 5, .max = 6}}}, inputs, {});
  EXPECT_TRUE(sample_sizes(inputs, fixed, {6}).empty());
}

// ---- inspecting the graph ----

TEST(DynamicDims, GraphsAreWrittenWithSymbols) {
  Compiled compiled(over_tensors([](const Tensors& in) {
                      return Tensors{in[0].mm(in[1]).mean(), in[0].t()};
                    }),
                    {.dynamic = over_batch});
  compiled({torch::ones({4, 3}), leaf({3, 2})});
  EXPECT_EQ(to_text(compiled.joint(0).graph),
            R"(graph(%0 primals_1: float32[B, 3], %1 primals_2: float32[3, 2], %5 tangents_1: float32[]) {
  %2: float32[B, 2] = aten::mm(%0, %1)
  %3: float32[] = aten::mean(%2, none)
  # backward
  %6: float32[B, 2] strides [0, 0] = aten::expand(%5, [B, 2], False)
  %7: float32[B, 2] = aten::div.Scalar(%6, B*2)
  %8: float32[3, B] strides [1, 3] = aten::t(%0)
  %9: float32[3, 2] = aten::mm(%8, %7)
  return (%3, none, none, %9)
}
)");
  const ViewAndMutationMeta& meta = compiled.meta(0);
  EXPECT_TRUE(meta.dynamic_outputs());
  EXPECT_TRUE(meta.outputs[0].dynamic_dims.empty());
  EXPECT_EQ(meta.outputs[1].dynamic_dims, std::vector<std::size_t>{1});
  EXPECT_EQ(meta.symbols_for_backward, 1u);
  EXPECT_EQ(to_text(compiled.partition(0).backward).find("[4"), std::string::npos);
}

TEST(DynamicDims, GraphsForGivenSizesAreWhatACaptureGives) {
  const std::vector<Tensorwise> functions{
      [](const Tensors& in) {
        return Tensors{in[0].matmul(in[1]).softmax(1).mean(), in[0].transpose(0, 1)};
      },
      [](const Tensors& in) {
        return Tensors{in[0].view({-1, 8}).mm(in[1]).view_as(in[0]).var(kFirstTwo, true),
                       in[0].slice(1, 1).reshape({-1})};
      }};
  for (const Tensorwise& function : functions) {
    Compiled compiled(over_tensors(function), {.dynamic = over_batch_and_length});
    compiled(values_of(sequence()({4, 6})));
    for (const Sizes& sizes : kBatchesAndLengths)
      expect_bound_is_captured(compiled, over_tensors(function), sequence()(sizes), sizes);
  }
}

TEST(DynamicDims, GraphsWithSymbolsNeedSizesToRun) {
  Compiled compiled(
      over_tensors([](const Tensors& in) { return Tensors{in[0].view({in[0].size(0) * 3}) * 2}; }),
      {.dynamic = over_batch});
  compiled({torch::ones({4, 3})});
  const Graph& graph = compiled.partition(0).forward;
  const Executor run(graph);
  const at::Tensor x = torch::randn({5, 3});
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { run({x}); }), "the graph has symbols, but no sizes were passed"));
  EXPECT_TRUE(torch::equal(run({x}, graph.table->at({5}).get())[0].toTensor(), x.view({-1}) * 2));
  EXPECT_TRUE(torch::equal(Executor(bind(graph, {5}))({x})[0].toTensor(), x.view({-1}) * 2));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         bind(graph, {5, 6});
                       }),
                       "number of sizes to bind: got 2, expected 1 for B"));
  // Files hold the table.
  const GraphFile read = decode_graph(encode_graph({compiled.joint(0), compiled.meta(0), {}, {}}));
  EXPECT_EQ(to_text(read.joint.graph), to_text(compiled.joint(0).graph));
  EXPECT_TRUE(
      torch::equal(Executor(read.joint.graph)({x}, read.joint.graph.table->at({5}).get())[0].toTensor(),
                   x.view({-1}) * 2));
  Graph without = graph;
  without.table.reset();
  EXPECT_TRUE(has_text(message_of<InvariantError>([&] { verify(without); }),
                       "refers to entry 0 of the symbolic table, which has 0 entries"));
}

TEST(DynamicDims, EqualNodesAreMergedOnlyWhereTheyAreEqualAtAllSizes) {
  Compiled compiled(over_tensors([](const Tensors& in) {
                      const std::int64_t b = in[0].size(0), t = in[0].size(1);
                      return Tensors{
                          (in[0].view({b * t}) * 2).view({b, t}) + (in[0].view({b * t}) * 2).view({b, t}),
                          in[0].expand({2, b, t}).sum(0)};
                    }),
                    {.dynamic = over_batch_and_length, .disable_passes = {"common-subexpressions", "views"}});
  compiled({torch::ones({4, 6})});
  Graph graph = compiled.partition(0).forward;
  EXPECT_GT(merge_common_subexpressions(graph), 0u);
  const at::Tensor x = torch::randn({3, 5});
  const auto results = Executor(graph)({x}, graph.table->at({3, 5}).get());
  EXPECT_TRUE(torch::equal(results[0].toTensor(), x * 2 + x * 2));
}

// ---- modules ----

// Training steps at many sizes match the plain module bit for bit.
template <class Module, class Make>
void expect_same_training(Module plain, Module original, const DynamicOptions& dynamic,
                          const std::vector<Sizes>& all_sizes, const Make& inputs_for) {
  auto fast = compile(original, {.dynamic = dynamic});
  for (std::size_t step = 0; step < 2 * all_sizes.size(); ++step) {
    const Sizes& sizes = all_sizes[step % all_sizes.size()];
    SCOPED_TRACE(testing::Message() << "step " << step << ", sizes " << testing::PrintToString(sizes));
    const auto inputs = inputs_for(sizes);
    const auto result_of = [&](auto& module) {
      torch::manual_seed(100 + static_cast<std::int64_t>(step));
      module->zero_grad();
      const at::Tensor result = std::apply([&](const auto&... in) { return module->forward(in...); }, inputs);
      result.pow(2).mean().backward();
      return result;
    };
    const at::Tensor expected = result_of(plain), actual = result_of(fast);
    EXPECT_TRUE(torch::equal(actual, expected));
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      const at::Tensor a = original->parameters()[i], b = plain->parameters()[i];
      ASSERT_TRUE(a.grad().defined()) << plain->named_parameters().keys()[i];
      EXPECT_TRUE(torch::equal(a.grad(), b.grad())) << plain->named_parameters().keys()[i];
      a.sub_(a.grad(), 0.1);
      b.sub_(b.grad(), 0.1);
    }
    for (std::size_t i = 0; i < plain->buffers().size(); ++i)
      EXPECT_TRUE(torch::equal(original->buffers()[i], plain->buffers()[i]));
  }
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u) << compiled_entry(*fast, 0).why_not_dynamic();
  EXPECT_TRUE(compiled_entry(*fast, 0).is_dynamic(0)) << compiled_entry(*fast, 0).why_not_dynamic();
}

nn::Sequential classifier() {
  torch::manual_seed(3);
  return nn::Sequential(nn::Linear(6, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(0.2),
                        nn::Linear(16, 4));
}

TEST(DynamicModule, Classifier) {
  expect_same_training(classifier(), classifier(), {.dims = {{"args[0]", 0, "B"}}},
                       {{8}, {3}, {16}, {2}, {5}, {33}}, [](const Sizes& sizes) {
                         return std::tuple(torch::randn({sizes[0], 6}));
                       });
}

TEST(DynamicModule, TrainingAndEvaluationHaveOneCaptureEach) {
  nn::Sequential net = classifier();
  auto fast = compile(net, {.dynamic = {.dims = {{"args[0]", 0, "B"}}}});
  for (const std::int64_t batch : {4, 9, 5})
    for (const bool training : {true, false}) {
      fast->train(training);
      fast->forward(torch::randn({batch, 6}));
    }
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 2u);
  EXPECT_TRUE(has_text(to_text(compiled_entry(*fast, 0).joint(1).graph), "args[0]: float32[B, 6]"));
}

TEST(DynamicModule, Transformer) {
  using namespace models::test;
  for (const bool tied : {false, true})
    expect_same_training(
        made(small(tied)), made(small(tied)),
        {.dims = {{"args[0]", 0, "B"}, {"args[0]", 1, "T"}, {"args[1]", 0, "B"}, {"args[1]", 1, "T"}}},
        {{2, 9}, {3, 9}, {2, 12}, {5, 4}, {4, 7}, {3, 11}},
        [](const Sizes& sizes) { return std::tuple(tokens_for(small(), sizes[0], sizes[1]), at::Tensor()); });
}

TEST(DynamicModule, TransformerWithDocuments) {
  using namespace models::test;
  expect_same_training(
      made(small()), made(small()),
      {.dims = {{"args[0]", 0, "B"}, {"args[0]", 1, "T"}, {"args[1]", 0, "B"}, {"args[1]", 1, "T"}}},
      {{2, 9}, {3, 9}, {2, 12}, {5, 4}, {4, 7}}, [](const Sizes& sizes) {
        return std::tuple(tokens_for(small(), sizes[0], sizes[1]),
                          torch::arange(sizes[0] * sizes[1]).reshape({sizes[0], sizes[1]}).div(4, "floor"));
      });
}

TEST(DynamicModule, NamesOfArguments) {
  nn::Sequential net = classifier();
  auto wrong = compile(net, {.dynamic = {.dims = {{"x", 0, "B"}}}});
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         wrong->forward(torch::randn({4, 6}));
                       }),
                       "input 'x', which this function does not have; it has "));
  auto parameter = compile(net, {.dynamic = {.dims = {{"0.weight", 0, "B"}}}});
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         parameter->forward(torch::randn({4, 6}));
                       }),
                       "0.weight is a parameter or buffer"));
}

}  // namespace dynamic_dims_test
}  // namespace penstock::graph
