#include "penstock/graph/run/saving_node.h"

#include <ATen/Context.h>
#include <c10/core/GradMode.h>

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
  released_ = true;
}

std::vector<at::Tensor> SavingNode::unpack() {
  if (c10::GradMode::is_enabled())
    throw NotImplemented(
        "graph: the backward of a captured function cannot be differentiated; call backward without "
        "create_graph, or the "
        "function itself");
  if (at::globalContext().deterministicAlgorithms() && !deterministic_)
    throw StateError(
        "graph: deterministic algorithms are enabled in backward, but were not in forward; enable them "
        "before both");
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  std::vector<at::Tensor> tensors;
  for (const SavedVariable& variable : saved_) tensors.push_back(variable.unpack(held(*this)));
  for (const SavedVariable& variable : watched_) variable.unpack(held(*this));
  return tensors;
}

void SavingNode::give_up() {
  if (!releasing_) return;
  const std::lock_guard lock(mutex_);
  for (SavedVariable& variable : saved_) variable.reset_data();
}

}  // namespace penstock::graph
