// Records the effects of a call, to compare a captured function with the function itself.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "penstock/graph/trace/analyze.h"
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

// The effects of a call of a function.
struct Trace {
  Tensors outputs, inputs, gradients;
  bool refused = false;  // backward threw: a tensor it needs was written
};

// Clones `leaves`, passes them through `prepare`, and differentiates through everything that the call returns
// or writes.
inline Trace trace_of(const std::function<Values(const Values&)>& call, const Tensors& leaves,
                      const std::function<Tensors(const Tensors&)>& prepare) {
  Tensors fresh;
  for (const at::Tensor& leaf : leaves)
    fresh.push_back(leaf.detach().clone().set_requires_grad(leaf.requires_grad()));
  const Tensors inputs = prepare(fresh);
  torch::manual_seed(11);
  Trace trace;
  at::Tensor loss = torch::zeros({});
  const auto add = [&](const at::Tensor& tensor, double weight) {
    if (!tensor.requires_grad()) return;
    const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
    loss = loss + (real * torch::linspace(-1, weight, real.numel()).reshape(real.sizes())).sum();
  };
  for (const c10::IValue& output : call(values_of(inputs))) {
    trace.outputs.push_back(output.toTensor());
    add(trace.outputs.back(), 1.5);
  }
  for (const at::Tensor& input : inputs) {
    trace.inputs.push_back(input);
    // For a view whose base was written, autograd computes it when queried and reports a leaf until then.
    input.grad_fn();
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

// NaNs compare equal: a float that was written as an integer may be one.
inline bool same_numbers(const at::Tensor& actual, const at::Tensor& expected, Compare compare) {
  const auto real = [](const at::Tensor& tensor) {
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
    return plain.is_complex() ? at::view_as_real(plain) : plain;
  };
  const at::Tensor a = real(actual), b = real(expected);
  if (compare == Compare::Exactly || !a.is_floating_point())
    return a.eq(b).logical_or(a.ne(a).logical_and(b.ne(b))).all().item<bool>();
  return torch::allclose(a, b, 1e-4, 1e-5, /*equal_nan=*/true);
}

inline void expect_same(const Tensors& actual, const Tensors& expected, const char* what,
                        Compare compare = Compare::Exactly) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << what << " " << i;
    if (!actual[i].defined()) continue;
    EXPECT_EQ(actual[i].sizes(), expected[i].sizes()) << what << " " << i;
    EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type()) << what << " " << i;
    if (actual[i].sizes() != expected[i].sizes() || actual[i].scalar_type() != expected[i].scalar_type())
      continue;
    EXPECT_TRUE(same_numbers(actual[i], expected[i], compare)) << what << " " << i << "\n"
                                                               << actual[i] << "\nexpected\n"
                                                               << expected[i];
  }
}

// Where an element is stored, and whether it is stored unchanged.
inline void expect_same_look(const Tensors& actual, const Tensors& expected, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].is_conj(), expected[i].is_conj()) << what << " " << i;
    EXPECT_EQ(actual[i].is_neg(), expected[i].is_neg()) << what << " " << i;
    EXPECT_EQ(actual[i].requires_grad(), expected[i].requires_grad()) << what << " " << i;
    for (std::int64_t dim = 0; dim < actual[i].dim(); ++dim)
      EXPECT_TRUE(actual[i].size(dim) <= 1 || actual[i].stride(dim) == expected[i].stride(dim))
          << what << " " << i << " has strides " << actual[i].strides();
  }
}

// Expects the results to share memory with the inputs and with each other as in the plain run: writing one of
// them writes the others. Writes all results.
inline void expect_same_memory(const Trace& actual, const Trace& expected) {
  ASSERT_EQ(actual.outputs.size(), expected.outputs.size());
  const auto shared = [](const Tensors& a, std::size_t i, const Tensors& b) {
    std::vector<std::size_t> places;
    for (std::size_t j = 0; j < b.size(); ++j)
      if (a[i].is_alias_of(b[j])) places.push_back(j);
    return places;
  };
  for (std::size_t i = 0; i < actual.outputs.size(); ++i) {
    EXPECT_EQ(shared(actual.outputs, i, actual.inputs), shared(expected.outputs, i, expected.inputs))
        << "output " << i << " in inputs";
    EXPECT_EQ(shared(actual.outputs, i, actual.outputs), shared(expected.outputs, i, expected.outputs))
        << "output " << i << " in outputs";
    if (overlaps_itself(geometry_of(expected.outputs[i]))) continue;
    for (const Trace* trace : {&actual, &expected})
      trace->outputs[i].detach().fill_(static_cast<std::int64_t>(i) + 7);
    expect_same(actual.inputs, expected.inputs, "after a result was written, input");
    expect_same(actual.outputs, expected.outputs, "after a result was written, output");
  }
}

inline at::Tensor leaf(at::IntArrayRef sizes, bool requires_grad = true) {
  return torch::randn(sizes).set_requires_grad(requires_grad);
}

inline Tensors cloned(const Tensors& tensors) {
  Tensors clones;
  for (const at::Tensor& tensor : tensors) clones.push_back(tensor.clone());
  return clones;
}

}  // namespace penstock::graph
