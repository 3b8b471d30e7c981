#include "penstock/graph/run/captured_node.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/tensor_subclass.h"

namespace penstock::graph {
namespace {

using torch::autograd::variable_list;

// Has the layout for which backward was captured, because backward may view it. A result that nobody used has
// no gradient: zeros.
at::Tensor tangent(const at::Tensor& gradient, const Geometry& geometry, const BoundSizes* sizes) {
  const LayoutInCall layout = layout_in_call(geometry, sizes);
  if (!gradient.defined())
    return at::empty_strided(layout.sizes, layout.strides, at::dtype(geometry.dtype).device(geometry.device))
        .zero_();
  if (is_wrapper(gradient))
    throw TypeError(describe("graph: a gradient of a captured function",
                             "a tensor of kind " + std::string(payload_of(gradient)->kind()),
                             "a plain tensor", "pass a gradient of the same kind as the result"));
  if (gradient.sizes() != layout.sizes || gradient.scalar_type() != geometry.dtype)
    throw ValueError(fmt::format(
        "graph: a gradient has {} elements of {}, expected {} of {}; pass gradients that match the results",
        gradient.numel(), c10::toString(gradient.scalar_type()), c10::multiply_integers(layout.sizes),
        c10::toString(geometry.dtype)));
  // Backward was captured for a gradient without lazy conjugate or negative bits.
  if (gradient.strides() == layout.strides && !gradient.is_conj() && !gradient.is_neg()) return gradient;
  return at::empty_strided(layout.sizes, layout.strides, gradient.options()).copy_(gradient);
}

// The same tensor, with the same version counter. What holds a result with its history holds the node.
at::Tensor without_history(const at::Tensor& tensor) {
  if (!tensor.grad_fn()) return tensor;
  const auto& impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace

void CapturedNode::save_all(const std::vector<c10::IValue>& values, const std::vector<at::Tensor>& primals,
                            const std::vector<at::Tensor>& results, WeightsNode* weights) {
  const auto saved = [&](std::size_t i) {
    const GraphCall::Saved& how = call_->saved[i];
    at::Tensor tensor = values[call_->forward_outputs + i].toTensor();
    if (how.how == GraphCall::Saved::How::Copied) {
      const at::NoGradGuard no_grad;
      tensor = copy_keeping_lazy_bits(tensor.detach());
    }
    if (how.how == GraphCall::Saved::How::Unwatched) tensor = tensor.variable_data();
    return tensor;
  };
  for (const std::size_t primal : call_->watched.primals) watch(primals[primal]);
  for (const std::size_t output : call_->watched.outputs) watch(results[output]);
  if (!weights) {
    for (std::size_t i = 0; i < call_->saved.size(); ++i) save(saved(i));
    return;
  }
  const CompiledHalves& halves = call_->halves;
  auto mine = halves.saved_for_backward.begin(), its = halves.saved_for_weights.begin();
  for (std::size_t i = 0; i < call_->saved.size(); ++i) {
    const bool is_mine = mine != halves.saved_for_backward.end() && *mine == i,
               is_its = its != halves.saved_for_weights.end() && *its == i;
    if (!is_mine && !is_its) continue;
    const at::Tensor tensor = saved(i);
    if (is_mine) save(tensor), ++mine;
    if (is_its) weights->keep(without_history(tensor)), ++its;
  }
  // The second part does not read what the first one writes in the end.
  const auto written_first = [&](std::size_t primal) {
    return std::any_of(call_->written_in_backward.begin(), call_->written_in_backward.end(),
                       [&](const GraphCall::WrittenInBackward& written) { return written.primal == primal; });
  };
  for (const std::size_t primal : call_->watched.primals)
    if (!written_first(primal)) weights->check_unwritten(without_history(primals[primal]));
  for (const std::size_t output : call_->watched.outputs)
    weights->check_unwritten(without_history(results[output]));
}

void CapturedNode::hold(const std::vector<at::Tensor>& primals) {
  if (call_->run_again) hold_inputs(call_->run_again, primals, call_->kept_inputs);
}

variable_list CapturedNode::apply(variable_list&& gradients) {
  const bool releasing = take_releasing();
  if (c10::GradMode::is_enabled()) {
    variable_list all = gradients_again(gradients);
    if (call_->halves.weights) all.push_back(carry(take_deferred(all), call_->device_of_gradients));
    return all;
  }
  std::vector<at::Tensor> inputs = unpack();
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (const auto& geometry = call_->tangents[i].geometry)
      gradients[i] = tangent(gradients[i], *geometry, sizes_.get());
  for (const auto& wrapper : call_->halves.wrappers) gradients = wrapper->tangents(std::move(gradients));
  std::move(gradients.begin(), gradients.end(), std::back_inserter(inputs));
  gradients.clear();
  // What backward writes was computed from the values at forward.
  for (std::size_t i = 0; i < written_.size(); ++i)
    if (static_cast<std::int64_t>(written_[i].tensor._version()) != written_[i].version)
      throw StateError(
          fmt::format("graph: {}, which backward writes, was modified after forward; run backward once, "
                      "before the next write",
                      call_->written_in_backward[i].name));
  give_up(releasing);
  const StepOfForward step(*this);
  variable_list results;
  for (const c10::IValue& gradient : call_->halves.backward->run(std::move(inputs), sizes_.get()))
    results.push_back(gradient.isTensor() ? gradient.toTensor() : at::Tensor());
  const std::size_t gradients_end = results.size() - call_->halves.kept - written_.size();
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < written_.size(); ++i) written_[i].tensor.copy_(results[gradients_end + i]);
  if (!call_->halves.weights) {
    results.resize(gradients_end);
    return results;
  }
  const auto kept = results.end() - static_cast<std::ptrdiff_t>(call_->halves.kept);
  CarriedValues carried{.tensors = {std::make_move_iterator(kept), std::make_move_iterator(results.end())}};
  results.resize(gradients_end);
  results.push_back(carry(std::move(carried), call_->device_of_gradients));
  return results;
}

// The gradients that the second part returns, of all gradients.
CarriedValues CapturedNode::take_deferred(variable_list& gradients) const {
  CarriedValues taken{.tensors = {}, .are_gradients = true};
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (call_->halves.is_deferred[i]) taken.tensors.push_back(std::exchange(gradients[i], at::Tensor()));
  return taken;
}

variable_list WeightsNode::apply(variable_list&& carrier) {
  const bool releasing = take_releasing();
  std::optional<CarriedValues> carried = take_carried(std::move(carrier.at(0)));
  if (!carried)
    throw StateError(
        "graph: gradients of parameters of a captured function are computed from another gradient than the "
        "one that its first part returned; let no hook of autograd's nodes replace gradients");
  if (carried->are_gradients) return std::move(carried->tensors);
  std::vector<at::Tensor> inputs = unpack();
  std::move(carried->tensors.begin(), carried->tensors.end(), std::back_inserter(inputs));
  carried.reset();
  give_up(releasing);
  const StepOfForward step(*this);
  const std::vector<c10::IValue> results = call_->halves.weights->run(std::move(inputs), sizes_.get());
  variable_list gradients;
  for (std::size_t i = 0; i < call_->halves.is_deferred.size(); ++i)
    if (call_->halves.is_deferred[i])
      gradients.push_back(results[i].isTensor() ? results[i].toTensor() : at::Tensor());
  return gradients;
}

}  // namespace penstock::graph
