// The backward of one stage, in one pass or in two halves: first the gradients of its inputs, which the
// previous stage waits for, later the gradients of its weights, which no other stage waits for.
//
//   // where the graph of the forward ends; no output is kept alive
//   auto outputs = OutputEdges::of(stage_outputs);
//   // in one pass
//   std::vector<at::Tensor> input_grads = stage_backward(outputs, output_grads, inputs);
//   // in halves
//   auto [input_grads, weights] = stage_backward_input(outputs, output_grads, inputs);
//   send(input_grads);
//   ...
//   weights.run();                                                  // adds to the .grad() of the parameters
//
// Both ways produce the same bits. `inputs` are autograd leaves made for this microbatch; their .grad() is
// undefined afterwards. Inputs that need no gradient, or that the outputs do not depend on, get an undefined
// gradient. An undefined output gradient contributes nothing. Tied weights, custom functions, tensor and
// parameter hooks, and outputs that do not depend on any input work the same in both ways; hooks run once.
// The gradients of inputs share memory with nothing else.
//
// The halves. Walking back from the outputs, a node that reaches an input belongs to the first half. Where
// such a node also leads to weights, the gradients that arrive at it are kept for the second half, which
// starts from these nodes alone and never passes through the first half again: what the second half does not
// need is freed on the way. If none of a stage's inputs needs a gradient, as in the first stage, the graph is
// cut above the lowest operators that use weights.
//
// Weights are computed in the first half if deferring them would save nothing or could change bits. They are
// deferred in groups: weights that meet in one operator, or in the computation of another weight, stay
// together, so that all gradients of a weight are summed in one pass. A group is not deferred if
//   - all weights of the group have at most one dim (as in normalizations): they cost less than what they
//     would keep alive;
//   - only custom functions lead to the group: these compute all their gradients in one call, in the first
//     half. A captured function whose backward is split (compile_options.h) has decided by itself which
//     gradients are computed in which half;
//   - the graph sums three gradients or more for one weight (a weight tied three times) and either several
//     threads built it, or it has views that were read again after their base was written: the order of the
//     additions could not be kept otherwise.
// If the backward of a function adds to .grad() by itself, as activation checkpointing does, the addition
// happens when it runs, in the first half. If such a weight is also used outside of the function, the order
// of these two additions may change.
//
// Thread safety: the halves of one forward run on one thread, in this order, once each. Grad mode does not
// matter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace penstock {

// Where the outputs leave the autograd graph. Keeps the graph alive, but not the outputs.
class OutputEdges {
 public:
  OutputEdges();
  ~OutputEdges();
  OutputEdges(OutputEdges&&) noexcept;
  OutputEdges& operator=(OutputEdges&&) noexcept;

  // Undefined tensors and tensors that need no gradient count as outputs without a graph.
  static OutputEdges of(const std::vector<at::Tensor>& outputs);

  std::size_t size() const;
  bool needs_grad(std::size_t output) const;
  bool empty() const { return size() == 0; }

 private:
  friend struct BackwardPass;
  struct State;
  std::unique_ptr<State> state_;
};

// The second half. Destroying it without running it discards the gradients.
class WeightBackward {
 public:
  WeightBackward();  // nothing pending
  ~WeightBackward();
  WeightBackward(WeightBackward&&) noexcept;
  WeightBackward& operator=(WeightBackward&&) noexcept;

  bool pending() const;
  // Throws StateError if nothing is pending; errors of the graph propagate.
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

// Both throw ValueError if the number of output gradients differs from the number of outputs, if a gradient
// has another shape than its output, and if an input that needs a gradient is not a leaf. Errors of the graph
// propagate. `outputs` is consumed.
std::vector<at::Tensor> stage_backward(OutputEdges outputs, const std::vector<at::Tensor>& output_grads,
                                       const std::vector<at::Tensor>& inputs);
InputBackward stage_backward_input(OutputEdges outputs, const std::vector<at::Tensor>& output_grads,
                                   const std::vector<at::Tensor>& inputs);

}  // namespace penstock
