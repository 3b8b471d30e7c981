#include "penstock/graph/run/saving_node.h"

#include <ATen/Context.h>

#include <mutex>

#include "penstock/errors.h"

namespace penstock::graph {

using torch::autograd::SavedVariable;

at::Tensor copy_keeping_lazy_bits(const at::Tensor& tensor) {
  at::Tensor copy = tensor.is_neg() ? tensor._neg_view() : tensor;
  copy = (tensor.is_conj() ? copy.conj() : copy).clone();
  if (tensor.is_conj()) copy = copy.conj();
  return tensor.is_neg() ? copy._neg_view() : copy;
}

SavingNode::SavingNode()
    : deterministic_(at::globalContext().deterministicAlgorithms()), step_(StepContext::current()) {}

void SavingNode::release_variables() {
  const std::lock_guard lock(mutex_);
  for (std::vector<SavedVariable>* list : {&saved_, &watched_})
    for (SavedVariable& variable : *list) variable.reset_data();
  held_inputs_.release();
  released_ = true;
}

void SavingNode::hold_inputs(std::shared_ptr<const RunAgain> again, const std::vector<at::Tensor>& primals,
                             const std::vector<char>& kept) {
  again_ = std::move(again);
  held_inputs_.reserve(primals.size());
  for (std::size_t i = 0; i < primals.size(); ++i) held_inputs_.hold(primals[i], kept[i] != 0);
}

torch::autograd::variable_list SavingNode::gradients_again(const torch::autograd::variable_list& tangents) {
  if (!again_)
    throw NotImplemented(
        "graph: the backward of a captured function cannot be differentiated; call backward without "
        "create_graph, set second_derivatives, or call the function itself");
  again_->check_possible();
  std::vector<at::Tensor> inputs;
  {
    const std::lock_guard lock(mutex_);
    check();
    inputs = held_inputs_.get(*again_);
  }
  const StepOfForward step(*this);
  return again_->gradients(inputs, tangents);
}

void SavingNode::check() const {
  if (at::globalContext().deterministicAlgorithms() && !deterministic_)
    throw StateError(
        "graph: deterministic algorithms are enabled in backward, but were not in forward; enable them "
        "before both");
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
}

std::vector<at::Tensor> SavingNode::unpack() {
  const std::lock_guard lock(mutex_);
  check();
  std::vector<at::Tensor> tensors;
  for (const SavedVariable& variable : saved_) tensors.push_back(variable.unpack(held(*this)));
  for (const SavedVariable& variable : watched_) variable.unpack(held(*this));
  return tensors;
}

void SavingNode::give_up(bool releasing) {
  if (!releasing) return;
  const std::lock_guard lock(mutex_);
  for (SavedVariable& variable : saved_) variable.reset_data();
  held_inputs_.release();
}

}  // namespace penstock::graph
