// Random programs of three-dimensional products and views of them, in sizes for which the executor has ways
// of its own: the bits of the plain run, with and without writes, forward and backward.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>

#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/function_capture.h"
#include "tests/graph/call_trace.h"

namespace penstock::graph {
namespace batched_products_test {

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 200;
}

// The pool holds batches [b, n, n] of the same b and n, in any layout.
Tensors batched_program(unsigned seed, const Tensors& inputs, bool writes) {
  std::mt19937 random(seed);
  const auto choose = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  Tensors pool = inputs;
  const auto any = [&] {
    return pool[choose(3) > 0 ? pool.size() - 1 - choose(std::min<std::size_t>(pool.size(), 3))
                              : choose(pool.size())];
  };
  const std::int64_t batch = inputs[0].size(0), n = inputs[0].size(1);
  const std::size_t steps = 3 + choose(8);
  for (std::size_t step = 0; step < steps; ++step) {
    const at::Tensor x = any(), y = any();
    const auto row = static_cast<std::int64_t>(choose(static_cast<std::size_t>(n)));
    switch (choose(writes ? 20 : 17)) {
      case 0:
        pool.push_back(at::bmm(x, y));
        break;
      case 1:
        pool.push_back(at::bmm(x, y.transpose(1, 2)));
        break;
      case 2:
        pool.push_back(at::bmm(x.transpose(1, 2), y).transpose(1, 2));
        break;
      case 3:
        pool.push_back(at::matmul(x, y.select(0, 0)));
        break;
      case 4:
        pool.push_back(at::matmul(x.select(0, batch - 1).t(), y));
        break;
      case 5:
        pool.push_back(at::baddbmm(x, y, any()));
        break;
      case 6:
        pool.push_back(at::baddbmm(x.select(1, row).unsqueeze(1), y, x, 0.5, 2));
        break;
      case 7:
        pool.push_back(at::einsum("bij,bkj->bik", {x, y}));
        break;
      case 8:
        pool.push_back(at::einsum("bij,jk->bik", {x, y.select(0, 0)}));
        break;
      case 9:
        pool.push_back(at::bmm(x.select(0, 0).expand({batch, n, n}), y));
        break;
      case 10:  // a vector, an outer product
        pool.push_back(
            at::matmul(at::matmul(x, y.select(0, 0).select(0, row)).unsqueeze(2), x.narrow(1, row, 1)));
        break;
      case 11:  // factors in the middle of rows, and with gaps
        pool.push_back(
            at::bmm(at::cat({x, y}, 2).slice(2, 1, n + 1), at::cat({y, x}, 2).slice(2, 0, 2 * n, 2)));
        break;
      case 12:  // four dims
        pool.push_back(at::matmul(x.unsqueeze(1), y.unsqueeze(0)).select(1, 0));
        break;
      case 13:
        pool.push_back(at::tanh(x));
        break;
      case 14:
        pool.push_back(x + y.flip(0));
        break;
      case 15:
        pool.push_back(x.permute({0, 2, 1}) * 0.5);
        break;
      case 16:
        pool.push_back(
            at::addmm(x.select(0, 0), x.select(0, 0), y.select(0, batch - 1)).expand({batch, n, n}) * y);
        break;
      case 17:
        x.mul_(0.5);
        break;
      case 18:
        x.select(1, row).zero_();
        break;
      default:
        x.baddbmm_(y.clone(), x.transpose(1, 2).clone(), 0.5, 0.25);
    }
    pool.back() = pool.back() * (1.0 / static_cast<double>(n));
  }
  Tensors results;
  const std::size_t count = 1 + choose(3);
  for (std::size_t i = 0; i < count; ++i) results.push_back(pool[pool.size() - 1 - i]);
  return results;
}

Tensors inputs_of(unsigned seed) {
  torch::manual_seed(seed);
  constexpr std::int64_t kSizes[] = {1, 2, 5, 8, 9, 16, 24};
  const std::int64_t batch = 1 + seed % 4, n = kSizes[seed % std::size(kSizes)];
  const at::ScalarType dtype = seed % 5 == 4 ? at::kDouble : at::kFloat;
  return {torch::randn({batch, n, n}, dtype), torch::randn({batch, n, n}, dtype).transpose(1, 2),
          torch::randn({n, batch, n}, dtype).transpose(0, 1)};
}

void expect_same_bytes(const std::vector<c10::IValue>& actual, const Tensors& expected, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor tensor = actual[i].toTensor();
    ASSERT_EQ(tensor.sizes(), expected[i].sizes()) << what << " " << i;
    const auto bytes = [](const at::Tensor& of) {
      return of.detach().reshape({-1}).clone(at::MemoryFormat::Contiguous).view(at::kByte);
    };
    EXPECT_TRUE(torch::equal(bytes(tensor), bytes(expected[i]))) << what << " " << i;
  }
}

TEST(BatchedProducts, RandomProgramsThroughTheExecutor) {
  const at::NoGradGuard no_grad;
  std::size_t kernels = 0, reuses = 0;
  for (unsigned seed = 0; seed < programs() && !HasFailure(); ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    const auto function = [&](const Tensors& in) { return batched_program(seed, in, true); };
    const Tensors inputs = inputs_of(seed);
    Graph graph = capture_forward(over_tensors(function), values_of(inputs));
    const std::size_t outputs = graph.outputs.size();
    Tensors written = cloned(inputs);
    const Tensors expected = function(written);
    const Executor as_it_is(graph), functional(functionalize(Graph(graph), outputs));
    kernels += functional.counts().kernels;
    reuses += functional.counts().reuses;
    for (int run = 0; run < 3; ++run) {
      Tensors given = cloned(inputs);
      expect_same_bytes(as_it_is(given), expected, "with writes, output");
      expect_same(given, written, "with writes, input");
      expect_same_bytes(functional(cloned(inputs)), expected, "without writes, output");
    }
    if (HasFailure()) ADD_FAILURE() << to_text(graph);
  }
  EXPECT_GT(kernels, programs());
  EXPECT_GT(reuses, programs() / 4);
}

TEST(BatchedProducts, RandomProgramsForwardAndBackward) {
  for (unsigned seed = 0; seed < programs() / 2 && !HasFailure(); ++seed) {
    SCOPED_TRACE("program " + std::to_string(seed));
    const Function function =
        over_tensors([&](const Tensors& in) { return batched_program(seed, in, /*writes=*/false); });
    Tensors leaves = inputs_of(seed);
    for (std::size_t i = 0; i < leaves.size(); ++i) leaves[i].set_requires_grad((seed + i) % 3 != 0);
    const auto prepare = [](const Tensors& fresh) { return cloned(fresh); };
    Compiled compiled(function, {.partitioner = seed % 2 ? Partitioner::MinCut : Partitioner::Default,
                                 .verify_passes = true});
    const Trace expected = trace_of(function, leaves, prepare);
    for (int run = 0; run < 2; ++run) {
      const Trace actual = trace_of([&](const Values& in) { return compiled(in); }, leaves, prepare);
      expect_same(actual.outputs, expected.outputs, "output");
      expect_same(actual.gradients, expected.gradients, "gradient", Compare::Closely);
    }
  }
}

}  // namespace batched_products_test
}  // namespace penstock::graph
