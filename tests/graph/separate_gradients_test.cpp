// Gradients that are views of each other in a graph, and those of others' memory: what is added to one must
// not reach the others.
#include "penstock/graph/run/separate_gradients.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/run/half_requests.h"
#include "tests/graph/call_trace.h"

namespace penstock::graph {
namespace separate_gradients_test {

using TensorFunction = std::function<Tensors(const Tensors&)>;

// The gradients after three backwards, which add up as those of microbatches.
Tensors accumulated(const Function& call, const Tensors& inputs) {
  for (const at::Tensor& input : inputs) input.mutable_grad() = at::Tensor();
  torch::manual_seed(7);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor result = call(values_of(inputs))[0].toTensor();
    result.backward(torch::randn(result.sizes()));
  }
  Tensors gradients;
  for (const at::Tensor& input : inputs) gradients.push_back(input.grad());
  return gradients;
}

void expect_plain_gradients(const TensorFunction& function, const Tensors& inputs) {
  Tensors expected = accumulated(over_tensors(function), inputs);
  for (at::Tensor& gradient : expected)
    if (gradient.defined()) gradient = gradient.clone();
  for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut}) {
    Compiled compiled(over_tensors(function), {.partitioner = partitioner});
    expect_same(accumulated([&](const Values& values) { return compiled(values); }, inputs), expected,
                "gradient");
  }
}

std::vector<std::size_t> shared_of(const TensorFunction& function, const Tensors& inputs,
                                   const Convention& convention = {}, const SplitOptions& options = {}) {
  const PartitionedCapture made =
      partition(capture_function(over_tensors(function), values_of(inputs), convention), options);
  return gradients_in_shared_memory(made.halves.backward, backward_roles(made.capture, made.halves),
                                    made.halves.deferred);
}

TEST(SeparateGradients, OfATensorAndOfAView) {
  const TensorFunction function = [](const Tensors& in) {
    return Tensors{in[0] * (in[1].view({2, 2}) + in[2])};
  };
  const Tensors inputs{torch::randn({2, 2}), leaf({4}), leaf({2, 2})};
  expect_plain_gradients(function, inputs);
  EXPECT_EQ(shared_of(function, inputs), std::vector<std::size_t>{2});
}

// A query for each position, and embedded positions.
TEST(SeparateGradients, OfPositionsThatAreExpanded) {
  expect_plain_gradients(
      [](const Tensors& in) {
        return Tensors{in[0] * (in[1] + in[2].unsqueeze(0)).expand({3, 4, 5})};
      },
      {torch::randn({3, 4, 5}), leaf({1, 4, 5}), leaf({4, 5})});
}

// Parts of one memory that do not overlap, and what autograd copies by itself, are not copied.
TEST(SeparateGradients, NothingIsCopiedWithoutNeed) {
  const at::Tensor factor = torch::randn({5, 3});
  const TensorFunction parts = [](const Tensors& in) { return Tensors{at::cat({in[0], in[1]}) * in[2]}; };
  EXPECT_TRUE(shared_of(parts, {leaf({2, 3}), leaf({3, 3}), factor}).empty());
  const TensorFunction same = [](const Tensors& in) { return Tensors{(in[0] + in[1]) * in[2]}; };
  EXPECT_TRUE(shared_of(same, {leaf({5, 3}), leaf({5, 3}), factor}).empty());
  const TensorFunction expanded = [](const Tensors& in) { return Tensors{(in[0] + in[1].t()).sum()}; };
  EXPECT_TRUE(shared_of(expanded, {leaf({5, 3}), leaf({3, 5})}).empty());
  const TensorFunction products = [](const Tensors& in) { return Tensors{in[0].mm(in[1]).sin()}; };
  EXPECT_TRUE(shared_of(products, {leaf({5, 3}), leaf({3, 4})}).empty());
}

// The gradient is a view of what forward saved.
struct SavedAsGradient : torch::autograd::Function<SavedAsGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& other) {
    context->save_for_backward({other});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    return {context->get_saved_variables()[0].view({4}), at::Tensor()};
  }
};

TEST(SeparateGradients, OfWhatForwardSaved) {
  const TensorFunction function = [](const Tensors& in) {
    return Tensors{SavedAsGradient::apply(in[0], in[1])};
  };
  const at::Tensor x = leaf({4}), other = torch::randn({2, 2}), before = other.clone();
  EXPECT_EQ(shared_of(function, {x, other}), std::vector<std::size_t>{0});
  Compiled compiled(over_tensors(function));
  for (int call = 0; call < 2; ++call) compiled({x, other})[0].toTensor().sum().backward();
  EXPECT_TRUE(torch::equal(other, before));
  EXPECT_TRUE(torch::equal(x.grad(), (before * 2).view({4})));
}

// The gradients of w and x are views of what the second part reads for k; that of w waits, too.
TEST(SeparateGradients, OfBothPartsOfASplitBackward) {
  const at::Tensor w = leaf({32}), k = leaf({8, 8}), factor = torch::randn({4, 8});
  const TensorFunction function = [=](const Tensors& in) {
    return Tensors{(torch::linear(in[2], k) + w.view({4, 8}) + in[3].view({4, 8})) * in[4]};
  };
  CompileOptions options;
  options.split_backward = true;
  const Convention convention{.found = 2, .names = {}};
  const Tensors first{w, k, leaf({4, 8}), leaf({32}), factor};
  const auto shared = shared_of(function, first, convention, SplitOptions(options));
  EXPECT_EQ(std::count(shared.begin(), shared.end(), 3u), 1);
  Compiled compiled(over_tensors(function), options, convention);
  Tensors of_x, expected;
  at::Tensor of_w = torch::zeros({32});
  for (int call = 0; call < 3; ++call) {
    const at::Tensor z = leaf({4, 8}), x = leaf({32}), slope = torch::randn({4, 8});
    compiled(values_of({w, k, z, x, factor}))[0].toTensor().backward(slope);
    of_x.push_back(x.grad());
    expected.push_back((slope * factor).view({32}));
    of_w = of_w + expected.back();
  }
  EXPECT_FALSE(compiled.partition(0).deferred.empty());
  expect_same(of_x, expected, "gradient of an input");
  expect_same({w.grad()}, {of_w}, "gradient of a parameter");
}

}  // namespace separate_gradients_test
}  // namespace penstock::graph
