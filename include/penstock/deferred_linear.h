// A linear layer whose weight gradients are computed later, on request; the rest of the backward runs as
// usual.
//
//   DeferredLinear layer(16, 16);       // instead of torch::nn::Linear
//   WeightQueue queue;                  // one for each stage and microbatch
//   at::Tensor output;
//   {
//     WeightQueueGuard guard(queue);
//     output = layer->forward(x);
//   }
//   output.sum().backward();            // computes input gradients; weight gradients are queued
//   queue.run();                        // adds to .grad() of weights and biases
//
// Pipelines split a backward into an input half and a weight half automatically, by searching the graph.
// These layers are an alternative that costs less: nothing runs twice and no graph is searched. It covers
// only linear layers, which must be created as DeferredLinear. Both can be combined: the input half then runs
// the layers, and their weights wait in the queue. PipelineRuntime provides the queues itself.
//
// The queue is that of the guard around the forward; the graph remembers it, so the backward may run on any
// thread. Without a guard, or if neither weight nor bias requires grad, a DeferredLinear behaves like a
// torch::nn::Linear in every respect; also while it is captured as a part of a graph (compile.h,
// compiled_stage.h), which then computes the gradients of its weights itself.
//
// Gradients are bitwise equal to those of torch::nn::Linear, also if several layers of a queue share a
// weight. Hooks of the weights run once, in run(). A weight that is also used outside of these layers gets
// its gradient in two additions instead of one, which may round differently.
//
// Thread safety: run() after the backward has ended; the backward may run on a different thread.
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

// The pending weight gradients of one microbatch. Destroying a queue discards them; a backward whose queue
// has been destroyed throws StateError.
class WeightQueue {
 public:
  // Creates an empty queue.
  WeightQueue();
  // Discards what is pending.
  ~WeightQueue();
  // Moves the queue; backwards that are still to run add to the new object. The moved-from queue is empty.
  WeightQueue(WeightQueue&&) noexcept;
  // Discards what is pending here, then moves.
  WeightQueue& operator=(WeightQueue&&) noexcept;

  // Returns the number of pending layers.
  std::size_t size() const;
  // Returns whether nothing is pending.
  bool empty() const { return size() == 0; }
  // Merges all pending layers with the same weight and bias: their rows become one matrix, and run()
  // multiplies once. For a queue of several microbatches this means fewer and larger products, and one
  // addition to .grad(). The sum over the rows is then computed in a different order.
  void join_layers();
  // Computes all pending gradients and leaves the queue empty. Does nothing if nothing is pending.
  void run();

  // Internal.
  struct State;

 private:
  friend class WeightQueueGuard;
  std::shared_ptr<State> state_;
};

// While it exists, layers that run on this thread put their weight gradients into the queue. Guards may be
// nested; the innermost applies. Guards are destroyed on their own thread, innermost first.
class WeightQueueGuard {
 public:
  // Makes `queue` the queue of this thread.
  explicit WeightQueueGuard(WeightQueue& queue);
  // Restores the previous queue.
  ~WeightQueueGuard();
  // Not copyable.
  WeightQueueGuard(const WeightQueueGuard&) = delete;
  // Not assignable.
  WeightQueueGuard& operator=(const WeightQueueGuard&) = delete;

 private:
  std::shared_ptr<WeightQueue::State> previous_;
};

// The function that the layer calls. `input` is (..., in), `weight` (out, in), `bias` (out) or undefined;
// returns (..., out).
at::Tensor deferred_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

// The layer, used through DeferredLinear. Options, parameter names and initialization are those of
// torch::nn::Linear: with the same seed, both have the same initial values.
class DeferredLinearImpl : public torch::nn::Cloneable<DeferredLinearImpl> {
 public:
  // A layer with a bias.
  DeferredLinearImpl(std::int64_t in_features, std::int64_t out_features)
      : DeferredLinearImpl(torch::nn::LinearOptions(in_features, out_features)) {}
  // A layer with the given options.
  explicit DeferredLinearImpl(const torch::nn::LinearOptions& options);

  // Creates and initializes the parameters.
  void reset() override;
  // Initializes the parameters.
  void reset_parameters();
  // Writes "penstock::DeferredLinear(in_features=..., out_features=..., bias=...)".
  void pretty_print(std::ostream& stream) const override;
  // Returns deferred_linear(input, weight, bias).
  at::Tensor forward(const at::Tensor& input);

  torch::nn::LinearOptions options;  // as given to the constructor
  at::Tensor weight;                 // (out, in)
  at::Tensor bias;                   // (out), undefined without a bias
};
TORCH_MODULE(DeferredLinear);

}  // namespace penstock
