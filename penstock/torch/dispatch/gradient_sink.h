// Redirects the gradients of leaves to a sink instead of accumulating them in `grad()`.
//
//   const AccumulatorPtr hold = send_gradient_to(weight, sink, 3);  // before the operator that uses the leaf
//   y = at::linear(x, weight);                                        // the graph now holds the accumulator
//   y.sum().backward();  // sink.take(3, gradient); weight.grad() is unchanged
//
// LibTorch destroys a leaf's accumulator, and the sink's registration with it, when no graph holds it: call
// send_gradient_to for every use (it is cheap). User hooks on the leaf run first.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <functional>
#include <utility>

namespace penstock {

class GradientSink {
 public:
  virtual ~GradientSink() = default;
  // Called once per backward for each leaf that gets a gradient, on the thread that runs it, below autograd.
  // A recorded backward (create_graph) throws NotImplemented instead: the sink takes numbers, not their
  // history.
  virtual void take(std::size_t slot, at::Tensor gradient) = 0;
};

using AccumulatorPtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// The sink must outlive the leaf. `leaf` must require gradients.
[[nodiscard]] AccumulatorPtr send_gradient_to(const at::Tensor& leaf, GradientSink& sink, std::size_t slot);

// Returns whether a live graph can still send the leaf a gradient. If false, no backward will, until an
// operator uses the leaf again.
bool awaits_gradient(const at::Tensor& leaf);

// Returns whether this thread is running a backward.
bool in_backward();
// Calls `callback` at the end of the running backward, after everything else. Throws StateError outside of a
// backward.
void at_end_of_backward(std::function<void()> callback);

}  // namespace penstock
