// Taking the gradients of leaves out of autograd's hands: what would be accumulated in `grad()` goes to a sink instead.
//
//   const AccumulatorPtr hold = send_gradient_to(weight, sink, 3);    // before the operator that uses the leaf
//   y = at::linear(x, weight);                                        // the graph now holds the accumulator
//   y.sum().backward();                                               // sink.take(3, gradient), weight.grad() stays as it was
//
// LibTorch lets go of a leaf's accumulator when no graph holds it, and the sink with it: ask again for every use (it is cheap).
// Hooks that users have put on the leaf run first.
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
  // Called once in a backward for every leaf that gets a gradient, on the thread that runs it, below autograd.
  virtual void take(std::size_t slot, at::Tensor gradient) = 0;
};

using AccumulatorPtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// The sink must live as long as the leaf. `leaf` requires gradients.
[[nodiscard]] AccumulatorPtr send_gradient_to(const at::Tensor& leaf, GradientSink& sink, std::size_t slot);

// Whether some graph that is alive can still send the leaf a gradient. False means that no backward will, until an operator uses it again.
bool awaits_gradient(const at::Tensor& leaf);

// Whether this thread works for a backward.
bool in_backward();
// Calls `callback` when the backward that runs now has done everything else. Throws StateError outside of one.
void at_end_of_backward(std::function<void()> callback);

}  // namespace penstock
