// Activation recomputation: a part of a forward keeps its inputs only, and is computed again when its
// backward needs what it would have kept.
//
//   torch::nn::Linear layer(16, 16);
//   at::Tensor x = torch::randn({4, 16}).requires_grad_();
//   at::Tensor y = recompute(
//       [layer](const std::vector<at::Tensor>& in) mutable { return layer->forward(in[0]).tanh(); }, {x});
//   y.sum().backward();  // layer->forward runs a second time in here
//
// The autograd graph is that of the plain forward: the same nodes with the same edges in the same order, and
// each weight gets its gradient where it would get it otherwise. Only the tensors that the nodes saved are
// not kept. Gradients therefore have the same bits as without recomputation, and everything that works on
// graphs works on these: backwards in two halves, fully_shard, tensor parallelism, hooks, double backward.
//
// The second run takes place in the first node of the part that needs a saved tensor, on the thread of the
// backward. It finds the inputs, the StepContext (with recompute == true, so that dropout masks are the same
// and counters do not count again), the autocast state, the queue of deferred layers and, if requested, the
// random generators of the first run. What it computes is freed as the nodes of the backward are.
//
// Requirements. The function must compute the same operators again. It may use parameters and other tensors
// that it holds; these, and the inputs, must not be written between the two runs. Collectives in the function
// run again: the ranks must recompute the same parts, in the same order, as they do when all of them run the
// same schedule with the same settings.
//
// Calls within a part that is being recorded or recomputed belong to it and run as plain calls, as do calls
// without gradient mode and in trial runs. Nodes that keep tensors by themselves, not as saved variables of
// LibTorch, keep them. In a graph captured by compile() values are correct, but its own partition decides
// what is kept.
//
// Thread safety: any thread; a backward may run on another thread than its forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace penstock {

// How a part is recomputed.
struct RecomputeOptions {
  // Whether the second run ends as soon as it has saved as many tensors as the first: what the function does
  // after that, such as its last product, is not computed again. Saves time, and gives up a check: a second
  // run that saves more tensors than the first is noticed only if their shapes or dtypes differ.
  bool early_stop = false;
  // Whether the second run draws the same numbers from the default generators, of the CPU and of the devices
  // of the inputs. Functions whose random numbers all have keys (random.h, dropout.h) do not need it.
  bool preserve_generators = true;
};

// While it exists, what autograd saves on this thread is left out, to be computed by `function` of `inputs`
// when a backward needs it. recompute() is the usual way to create one.
class RecomputedPart {
 public:
  // Begins a part, or does nothing where recompute() is a plain call. Throws StateError if another library
  // has replaced the autograd engine of LibTorch, as Python does.
  RecomputedPart(std::function<void(const std::vector<at::Tensor>&)> function,
                 const std::vector<at::Tensor>& inputs, const RecomputeOptions& options = {});
  // Ends the part.
  ~RecomputedPart();
  // Not copyable.
  RecomputedPart(const RecomputedPart&) = delete;
  // Not assignable.
  RecomputedPart& operator=(const RecomputedPart&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns function(inputs), which may be of any type. `function` is copied and takes a const
// std::vector<at::Tensor>&; it runs again in the backward, with detached inputs. A backward throws StateError
// if an input was written after the first run, or if the second run saved other tensors than the first.
template <class Function>
std::invoke_result_t<Function&, const std::vector<at::Tensor>&> recompute(
    Function function, const std::vector<at::Tensor>& inputs, const RecomputeOptions& options = {}) {
  const RecomputedPart part([again = function](const std::vector<at::Tensor>& in) mutable { again(in); },
                            inputs, options);
  return function(inputs);
}

// Returns whether this thread is computing a part for the second time.
bool is_recomputing();

}  // namespace penstock
