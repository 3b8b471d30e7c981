// Compares the ways to run the backward of a stage, bit by bit.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "penstock/pipeline/backward/split_backward.h"

namespace penstock::test {

using Tensors = std::vector<at::Tensor>;
using Forward = std::function<Tensors(const Tensors&)>;

enum class Way { Autograd, AtOnce, Halves };

struct Gradients {
  std::vector<Tensors> inputs;  // by microbatch
  Tensors weights;
  int pending = 0;  // microbatches that left work for the second half
};

inline at::Tensor weight(at::IntArrayRef shape, at::ScalarType type = at::kFloat) {
  return (torch::randn(shape) * 0.3).to(type).requires_grad_(true);
}

inline bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() || (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::equal(a, b));
}

// Three microbatches, so that weights add to existing gradients; in halves they overlap. Gradients of outputs
// depend on the values of the outputs, and are omitted for those in `silent`.
inline Gradients run_way(Way way, const Forward& forward, const std::vector<Tensors>& microbatches,
                         const Tensors& weights, const std::vector<std::size_t>& silent = {}) {
  for (const at::Tensor& w : weights) w.mutable_grad() = at::Tensor();
  Gradients result;
  std::vector<WeightBackward> waiting;
  for (const Tensors& values : microbatches) {
    Tensors inputs;
    for (const at::Tensor& value : values)
      inputs.push_back(value.defined() ? value.detach().clone().requires_grad_(value.requires_grad())
                                       : value);
    Tensors outputs = forward(inputs), grads;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const bool none = !outputs[i].defined() || !outputs[i].requires_grad() ||
                        std::find(silent.begin(), silent.end(), i) != silent.end();
      grads.push_back(none ? at::Tensor() : outputs[i].detach() * 0.5 + 0.7);
    }
    if (way == Way::Autograd) {
      Tensors roots, root_grads;
      for (std::size_t i = 0; i < outputs.size(); ++i)
        if (grads[i].defined()) roots.push_back(outputs[i]), root_grads.push_back(grads[i]);
      if (!roots.empty()) torch::autograd::backward(roots, root_grads);
      Tensors& taken = result.inputs.emplace_back();
      for (const at::Tensor& input : inputs)
        taken.push_back(input.defined() && input.requires_grad() ? input.grad() : at::Tensor());
      continue;
    }
    OutputEdges edges = OutputEdges::of(outputs);
    outputs.clear();
    if (way == Way::AtOnce) {
      result.inputs.push_back(stage_backward(std::move(edges), grads, inputs));
    } else {
      InputBackward half = stage_backward_input(std::move(edges), grads, inputs);
      result.inputs.push_back(std::move(half.input_grads));
      result.pending += half.weights.pending();
      waiting.push_back(std::move(half.weights));
      if (waiting.size() > 1) {  // the second half of the previous microbatch
        if (waiting.front().pending()) waiting.front().run();
        waiting.erase(waiting.begin());
      }
    }
    for (const at::Tensor& input : inputs) EXPECT_FALSE(input.defined() && input.grad().defined());
  }
  for (WeightBackward& half : waiting)
    if (half.pending()) half.run();
  for (const at::Tensor& w : weights)
    result.weights.push_back(w.grad().defined() ? w.grad().clone() : at::Tensor());
  return result;
}

inline void expect_same(const Gradients& wanted, const Gradients& got, const std::string& what) {
  ASSERT_EQ(wanted.inputs.size(), got.inputs.size()) << what;
  for (std::size_t m = 0; m < wanted.inputs.size(); ++m) {
    ASSERT_EQ(wanted.inputs[m].size(), got.inputs[m].size()) << what;
    for (std::size_t i = 0; i < wanted.inputs[m].size(); ++i)
      EXPECT_TRUE(same(wanted.inputs[m][i], got.inputs[m][i]))
          << what << ": input " << i << " of microbatch " << m;
  }
  for (std::size_t i = 0; i < wanted.weights.size(); ++i)
    EXPECT_TRUE(same(wanted.weights[i], got.weights[i])) << what << ": weight " << i;
}

// Returns how many of the microbatches had a second half.
inline int check(const Forward& forward, const std::vector<Tensors>& microbatches, const Tensors& weights,
                 const std::vector<std::size_t>& silent = {}) {
  const Gradients wanted = run_way(Way::Autograd, forward, microbatches, weights, silent);
  expect_same(wanted, run_way(Way::AtOnce, forward, microbatches, weights, silent), "in one pass");
  const Gradients halves = run_way(Way::Halves, forward, microbatches, weights, silent);
  expect_same(wanted, halves, "in halves");
  return halves.pending;
}

// Microbatches of random values for inputs of these shapes, all of which need a gradient.
inline std::vector<Tensors> random_inputs(const std::vector<std::vector<std::int64_t>>& shapes,
                                          bool needs_grad = true) {
  std::vector<Tensors> microbatches(3);
  for (Tensors& inputs : microbatches)
    for (const auto& shape : shapes) inputs.push_back(torch::randn(shape).requires_grad_(needs_grad));
  return microbatches;
}

}  // namespace penstock::test
