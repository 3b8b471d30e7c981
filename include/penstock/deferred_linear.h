// A linear layer whose weight gradients wait until they are asked for, while all else of the backward runs as usual.
//
//   WeightQueue queue;                                  // one for each stage and microbatch
//   {
//     WeightQueueGuard guard(queue);
//     y = stage->forward(x);                            // with DeferredLinear where torch::nn::Linear was
//   }
//   stage_backward(OutputEdges::of({y}), {grad}, {x});  // gradients of the inputs; those of the weights are noted
//   queue.run();                                        // adds to the .grad() of weights and biases
//
// The opt-in way to a split backward: nothing runs twice and no graph is searched, so it costs less than stage_backward_input; but it
// covers linear layers alone, and each must be made as one. Both go together: the first half runs the layers, their weights wait in
// the queue.
//
// Which queue: that of the guard around the *forward*, remembered by the graph. So it does not matter on which thread the backward
// runs. Without a guard, and where no weight needs a gradient, a DeferredLinear is a torch::nn::Linear in every respect.
//
// Same bits as torch::nn::Linear, also when several layers of the queue share a weight. Hooks of the weights run, once, in run().
// A weight that is also used outside of these layers gets its gradient in two additions instead of one: same value, perhaps not
// the same last bit.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/linear.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>

namespace penstock {

// The weight gradients of one microbatch that wait. Thread rule: run() when the backward is over; a backward on another thread
// may fill it. Destroying it gives up what waits; a backward whose queue is gone throws StateError.
class WeightQueue {
 public:
  WeightQueue();
  ~WeightQueue();
  WeightQueue(WeightQueue&&) noexcept;
  WeightQueue& operator=(WeightQueue&&) noexcept;

  std::size_t size() const;  // layers that wait
  bool empty() const { return size() == 0; }
  // Makes one of all that wait for the same weight: their rows become one matrix, and run() multiplies once. For a queue of many
  // microbatches: fewer and larger products, and one addition to .grad(). The sum over rows is then taken in another order.
  void join_layers();
  // Computes all of them and leaves the queue empty; nothing to do is no error.
  void run();

  struct State;

 private:
  friend class WeightQueueGuard;
  std::shared_ptr<State> state_;
};

// Layers that run on this thread while it lives put their weight gradients into the queue. Guards nest; the innermost counts.
class WeightQueueGuard {
 public:
  explicit WeightQueueGuard(WeightQueue& queue);
  ~WeightQueueGuard();
  WeightQueueGuard(const WeightQueueGuard&) = delete;
  WeightQueueGuard& operator=(const WeightQueueGuard&) = delete;

 private:
  std::shared_ptr<WeightQueue::State> previous_;
};

// The function behind the layer; `bias` may be undefined. Inputs of any number of dims, features last.
at::Tensor deferred_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

// Options, names and initial values of torch::nn::Linear: with the same seed both hold the same numbers.
class DeferredLinearImpl : public torch::nn::Cloneable<DeferredLinearImpl> {
 public:
  DeferredLinearImpl(std::int64_t in_features, std::int64_t out_features) : DeferredLinearImpl(torch::nn::LinearOptions(in_features, out_features)) {}
  explicit DeferredLinearImpl(const torch::nn::LinearOptions& options);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  torch::nn::LinearOptions options;
  at::Tensor weight, bias;  // (out, in), (out) or undefined
};
TORCH_MODULE(DeferredLinear);

}  // namespace penstock
