// Backward of one stage, at once or in two halves: first the gradients of its inputs, which the previous stage waits for, later
// those of its weights, which nobody waits for.
//
//   auto outputs = OutputEdges::of(stage_outputs);                  // where the graph of the forward ends; no output is kept alive
//   // at once
//   std::vector<at::Tensor> input_grads = stage_backward(outputs, output_grads, inputs);
//   // in halves
//   auto [input_grads, weights] = stage_backward_input(outputs, output_grads, inputs);
//   send(input_grads);
//   ...
//   weights.run();                                                  // adds to the .grad() of the parameters
//
// Both ways give the same bits. `inputs` are leaves of autograd, made for this microbatch; their .grad() is undefined afterwards. Those
// that need no gradient, and those that the outputs do not depend on, get an undefined one. An output gradient that is undefined
// contributes nothing. Tied weights, custom functions, hooks of tensors and of parameters, and outputs that do not depend on any input
// work in halves as they do at once; hooks run once. The gradients of inputs share memory with nothing else.
//
// The halves. Walking back from the outputs, a node that reaches an input belongs to the first half. Where such a node also leads to
// weights, the gradients that arrive at it are kept for the second half, which starts from these nodes alone and never passes
// through the first half again: what the second half does not need is freed on the way. A stage none of whose inputs needs a gradient,
// as the first one, is cut above the lowest operators that use weights.
//
// Weights are done in the first half where waiting would gain nothing or could change bits. They wait in groups: weights that meet in
// one operator, or in the computation of another weight, stay together, so that all gradients of a weight are added up at once.
//   - All weights of the group have one dim at most (those of normalizations): they cost less than what they would keep alive.
//   - Nothing but custom functions leads to the group: these compute all their gradients in one call, in the first half.
//   - A sum of three gradients or more (a weight tied thrice) in a graph that several threads made, or with views that were read again
//     after their base was written to: the order of the additions could not be kept otherwise.
// What the backward of a function adds to .grad() by itself, as one that computes its forward again does, is added when it runs, in the
// first half. If such a weight is also used outside of the function, the order of these two additions may change.
//
// Thread rule: the halves of one forward run on one thread, in this order, once each. Grad mode does not matter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace penstock {

// The places of a graph where its outputs come out. Keeps the graph, and not the outputs.
class OutputEdges {
 public:
  OutputEdges();
  ~OutputEdges();
  OutputEdges(OutputEdges&&) noexcept;
  OutputEdges& operator=(OutputEdges&&) noexcept;

  // Undefined tensors and those that need no gradient count as outputs without a graph.
  static OutputEdges of(const std::vector<at::Tensor>& outputs);

  std::size_t size() const;
  bool needs_grad(std::size_t output) const;
  bool empty() const { return size() == 0; }

 private:
  friend struct BackwardPass;
  struct State;
  std::unique_ptr<State> state_;
};

// The half that is left. Destroying it without running it gives the gradients up.
class WeightBackward {
 public:
  WeightBackward();  // nothing is left
  ~WeightBackward();
  WeightBackward(WeightBackward&&) noexcept;
  WeightBackward& operator=(WeightBackward&&) noexcept;

  bool pending() const;
  // Throws StateError when nothing is pending; errors of the graph pass through.
  void run();

 private:
  friend struct BackwardPass;
  struct State;
  std::unique_ptr<State> state_;
};

struct InputBackward {
  std::vector<at::Tensor> input_grads;  // one for each input, possibly undefined
  WeightBackward weights;
};

// Both throw ValueError when there is another number of output gradients than of outputs, for a gradient of another shape than its
// output, and for an input that needs a gradient and is no leaf. Errors of the graph pass through. `outputs` are used up.
std::vector<at::Tensor> stage_backward(OutputEdges outputs, const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& inputs);
InputBackward stage_backward_input(OutputEdges outputs, const std::vector<at::Tensor>& output_grads, const std::vector<at::Tensor>& inputs);

}  // namespace penstock
