// What a call of a function leaves behind, to compare a captured function with the function itself.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "penstock/graph/analyze.h"
#include "tests/has_text.h"

namespace penstock::graph {

using Tensors = std::vector<at::Tensor>;

inline Function over_tensors(const std::function<Tensors(const Tensors&)>& function) {
  return [function](const Values& inputs) {
    Tensors tensors;
    for (const c10::IValue& input : inputs) tensors.push_back(input.toTensor());
    const Tensors results = function(tensors);
    return Values(results.begin(), results.end());
  };
}

inline Values values_of(const Tensors& tensors) { return Values(tensors.begin(), tensors.end()); }

// What a call of a function leaves behind.
struct Trace {
  Tensors outputs, inputs, gradients;
  bool refused = false;  // backward threw: something that it needs was written
};

// `leaves` are cloned, handed on through `prepare`, and differentiated through everything that the call gives or writes.
inline Trace trace_of(const std::function<Values(const Values&)>& call, const Tensors& leaves, const std::function<Tensors(const Tensors&)>& prepare) {
  Tensors fresh;
  for (const at::Tensor& leaf : leaves) fresh.push_back(leaf.detach().clone().set_requires_grad(leaf.requires_grad()));
  const Tensors inputs = prepare(fresh);
  torch::manual_seed(11);
  Trace trace;
  at::Tensor loss = torch::zeros({});
  const auto add = [&](const at::Tensor& tensor, double weight) {
    if (tensor.requires_grad()) loss = loss + (tensor * torch::linspace(-1, weight, tensor.numel()).reshape(tensor.sizes())).sum();
  };
  for (const c10::IValue& output : call(values_of(inputs))) {
    trace.outputs.push_back(output.toTensor());
    add(trace.outputs.back(), 1.5);
  }
  for (const at::Tensor& input : inputs) {
    trace.inputs.push_back(input);
    if (!input.is_leaf()) add(input, 2.5);
  }
  try {
    if (loss.requires_grad()) loss.backward();
  } catch (const c10::Error& error) {
    if (!penstock::test::has_text(error.what(), "modified by an inplace operation")) throw;
    trace.refused = true;
  }
  for (const at::Tensor& leaf : fresh) trace.gradients.push_back(leaf.grad());
  return trace;
}

enum class Compare { Exactly, Closely };

inline void expect_same(const Tensors& actual, const Tensors& expected, const char* what, Compare compare = Compare::Exactly) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << what << " " << i;
    if (!actual[i].defined()) continue;
    EXPECT_EQ(actual[i].sizes(), expected[i].sizes()) << what << " " << i;
    EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type()) << what << " " << i;
    EXPECT_TRUE(compare == Compare::Exactly ? torch::equal(actual[i], expected[i]) : torch::allclose(actual[i], expected[i], 1e-4, 1e-5))
        << what << " " << i << "\n" << actual[i] << "\nexpected\n" << expected[i];
  }
}

inline at::Tensor leaf(at::IntArrayRef sizes, bool requires_grad = true) { return torch::randn(sizes).set_requires_grad(requires_grad); }

inline Tensors cloned(const Tensors& tensors) {
  Tensors clones;
  for (const at::Tensor& tensor : tensors) clones.push_back(tensor.clone());
  return clones;
}

}  // namespace penstock::graph
