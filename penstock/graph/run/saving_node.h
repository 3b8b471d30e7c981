// A node of autograd that holds what a captured forward saved for its backward.
//
// Unless the graph is retained, saved tensors are given up when backward begins, so that each is freed at its last use, as where every operator is
// a node of its own. A backward that is refused before that leaves the graph as it was: it may be tried again.
// Private to this folder. Thread rule: as for nodes of autograd; saving is over before anybody else sees the node.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <string>
#include <vector>

#include "penstock/torch/compat/autograd_node.h"

namespace penstock::graph {

// In memory of its own, lazily conjugated or negated where the tensor is: the operators after it were captured for that.
at::Tensor copy_keeping_bits(const at::Tensor& tensor);

class SavingNode : public torch::autograd::Node {
 public:
  SavingNode();

  std::string name() const override { return "CapturedFunction"; }
  void will_release_variables() override { releasing_ = true; }
  void release_variables() override;

 protected:
  // After the results have their history: a result that was saved must not hold its own node.
  void save(const at::Tensor& tensor) { saved_.push_back(as_saved(tensor)); }
  // Only looked at in backward: was it written since?
  void watch(const at::Tensor& tensor) { watched_.push_back(as_saved(tensor)); }

  // What was saved, in order. Throws what every backward of a captured function refuses: NotImplemented when it is to be differentiated again,
  // StateError for deterministic algorithms that forward did not know of, c10::Error when it ran already or a tensor was written since.
  std::vector<at::Tensor> unpack();
  // When nothing is refused any more.
  void give_up();

 private:
  torch::autograd::SavedVariable as_saved(const at::Tensor& tensor) const { return {tensor, tensor.grad_fn().get() == this}; }

  std::vector<torch::autograd::SavedVariable> saved_, watched_;
  bool deterministic_;   // as forward ran
  bool releasing_ = false, released_ = false;
};

}  // namespace penstock::graph
