#include "penstock/graph/captured_node.h"

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <mutex>
#include <utility>

#include "penstock/base/errors.h"
#include "penstock/torch/wrapper.h"

namespace penstock::graph {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Laid out as when backward was captured: it may view it. A result that nobody used has no gradient: zeros.
at::Tensor tangent(const at::Tensor& gradient, const Geometry& geometry, const BoundSizes* sizes) {
  const LayoutInCall layout = layout_in_call(geometry, sizes);
  if (!gradient.defined())
    return at::empty_strided(layout.sizes, layout.strides, at::dtype(geometry.dtype).device(geometry.device)).zero_();
  if (is_wrapper(gradient))
    throw TypeError(describe("graph: a gradient of a captured function", "a tensor of kind " + std::string(payload_of(gradient)->kind()), "a plain tensor",
                             "give backward a gradient like the result"));
  if (gradient.sizes() != layout.sizes || gradient.scalar_type() != geometry.dtype)
    throw ValueError(fmt::format("graph: a gradient has {} elements of {}, expected {} of {}; give backward gradients like the results",
                                 gradient.numel(), c10::toString(gradient.scalar_type()), c10::multiply_integers(layout.sizes),
                                 c10::toString(geometry.dtype)));
  if (gradient.strides() == layout.strides) return gradient;
  return at::empty_strided(layout.sizes, layout.strides, gradient.options()).copy_(gradient);
}

}  // namespace

void check_backward(bool deterministic_in_forward) {
  if (c10::GradMode::is_enabled())
    throw NotImplemented("graph: the backward of a captured function cannot be differentiated; call backward without create_graph, or the "
                         "function itself");
  if (at::globalContext().deterministicAlgorithms() && !deterministic_in_forward)
    throw StateError("graph: deterministic algorithms are asked for in backward, but were not when forward ran; switch them on before both");
}

CapturedNode::CapturedNode(c10::intrusive_ptr<CapturedCall> call, c10::intrusive_ptr<BoundSizes> sizes)
    : call_(std::move(call)), sizes_(std::move(sizes)), deterministic_(at::globalContext().deterministicAlgorithms()) {}

void CapturedNode::save(const std::vector<c10::IValue>& values, const std::vector<at::Tensor>& primals, const std::vector<at::Tensor>& results) {
  // A result that was saved must not hold its own node.
  const auto as_saved = [&](const at::Tensor& tensor) { return SavedVariable(tensor, tensor.grad_fn().get() == this); };
  for (std::size_t i = 0; i < call_->saved.size(); ++i) {
    const CapturedCall::Saved& how = call_->saved[i];
    at::Tensor tensor = values[call_->joint.forward_outputs + i].toTensor();
    if (how.how == CapturedCall::Saved::How::Copied) {
      const at::NoGradGuard no_grad;
      tensor = tensor.detach().clone();
    }
    if (how.how == CapturedCall::Saved::How::Unwatched) tensor = tensor.variable_data();
    saved_.push_back(as_saved(tensor));
    if (how.watch_primal) watched_.push_back(as_saved(primals[*how.watch_primal]));
    if (how.watch_output) watched_.push_back(as_saved(results[*how.watch_output]));
  }
}

void CapturedNode::release_variables() {
  const std::lock_guard lock(mutex_);
  for (std::vector<SavedVariable>* list : {&saved_, &watched_})
    for (SavedVariable& variable : *list) variable.reset_data();
  released_ = true;
}

variable_list CapturedNode::apply(variable_list&& gradients) {
  check_backward(deterministic_);
  std::vector<at::Tensor> inputs;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    // Looks whether a tensor was written since, too.
    for (const SavedVariable& variable : saved_) inputs.push_back(variable.unpack(held(*this)));
    for (const SavedVariable& variable : watched_) variable.unpack(held(*this));
    if (releasing_)
      for (SavedVariable& variable : saved_) variable.reset_data();
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) inputs.push_back(tangent(gradients[i], call_->joint.tangents[i].geometry, sizes_.get()));
  gradients.clear();
  variable_list results;
  for (const c10::IValue& gradient : (*call_->backward)(std::move(inputs), sizes_.get()))
    results.push_back(gradient.isTensor() ? gradient.toTensor() : at::Tensor());
  return results;
}

}  // namespace penstock::graph
