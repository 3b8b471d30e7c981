// Derivatives that cannot be differentiated again.
//
//   static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
//     note_history(context, {x, weight});  // as they were given: copies made here have no history
//     ...
//   }
//   static variable_list backward(AutogradContext* context, const variable_list& gradients) {
//     return once_differentiable(context, "penstock::scale", gradients, [&] { return variable_list{...}; });
//   }
//
// A kernel computes gradients whose history autograd does not know. In a backward that is recorded
// (create_graph) they would look like constants, so that a second derivative would lack their terms without
// a word. Here they get a history whose backward throws NotImplemented, which names the operator: recording
// a backward stays possible, differentiating what a kernel has computed does not.
// Thread safety: any thread; nothing waits.
#pragma once

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <initializer_list>

namespace penstock {

// To be called by forward(): what the gradients will depend on. The tensors themselves are not kept alive.
void note_history(torch::autograd::AutogradContext* context, std::initializer_list<at::Tensor> inputs);

// Makes differentiating `results`, which depend on these gradients and on what `history` leads to, an error
// that names the operator.
void refuse_second_derivative(const char* op, const torch::autograd::variable_list& gradients,
                              torch::autograd::edge_list history, torch::autograd::variable_list& results);

namespace detail {
torch::autograd::edge_list noted_history(torch::autograd::AutogradContext* context);
}  // namespace detail

// What `compute` returns, which is called without recording.
template <class Compute>
torch::autograd::variable_list once_differentiable(torch::autograd::AutogradContext* context, const char* op,
                                                   const torch::autograd::variable_list& gradients,
                                                   const Compute& compute) {
  if (!c10::GradMode::is_enabled()) return compute();
  torch::autograd::variable_list results;
  {
    const c10::AutoGradMode unrecorded(false);
    results = compute();
  }
  refuse_second_derivative(op, gradients, detail::noted_history(context), results);
  return results;
}

}  // namespace penstock
