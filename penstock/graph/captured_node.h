// The node of autograd that stands for a whole captured function: holds what forward saved, and runs the backward graph.
//
// Made by CapturedCall. Its gradients come in the order of the capture's tangents. Unless the graph is retained, saved tensors are given up
// when backward begins, so that each is freed at its last use, as where every operator is a node of its own.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <string>
#include <vector>

#include "penstock/graph/captured_call.h"
#include "penstock/torch/autograd_node.h"

namespace penstock::graph {

// What backward of any captured function refuses: to be differentiated again, and deterministic algorithms that forward did not know of.
void check_backward(bool deterministic_in_forward);

class CapturedNode final : public torch::autograd::Node {
 public:
  // `sizes`: of dynamic dims, as they were in forward.
  CapturedNode(c10::intrusive_ptr<CapturedCall> call, c10::intrusive_ptr<BoundSizes> sizes);

  // After the results have their history. `values`: what the forward graph gave; `results`: by place among the forward outputs.
  void save(const std::vector<c10::IValue>& values, const std::vector<at::Tensor>& primals, const std::vector<at::Tensor>& results);

  std::string name() const override { return "CapturedFunction"; }
  void will_release_variables() override { releasing_ = true; }
  void release_variables() override;

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  c10::intrusive_ptr<CapturedCall> call_;
  c10::intrusive_ptr<BoundSizes> sizes_;
  std::vector<torch::autograd::SavedVariable> saved_;
  std::vector<torch::autograd::SavedVariable> watched_;  // only looked at: were they written since?
  bool deterministic_ = false;                           // as forward ran
  bool releasing_ = false, released_ = false;
};

}  // namespace penstock::graph
