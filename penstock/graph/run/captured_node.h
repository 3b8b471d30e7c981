// The autograd node of a whole captured function: holds what forward saved, and runs the backward graph. If
// backward is split (partition/backward_split.h), this is its first part, and one more node runs the second:
//
//   CapturedNode -> gradients of arguments and of some parameters, a carrier (carried_values.h)
//                     carrier -> WeightsNode -> gradients of the other parameters
//
// Created by GraphCall. Its gradients are in the order of the capture's tangents.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/graph/run/carried_values.h"
#include "penstock/graph/run/graph_call.h"
#include "penstock/graph/run/saving_node.h"
#include "penstock/torch/compat/autograd_node.h"

namespace penstock::graph {

// The second part of a split backward. It holds what it needs of the saved tensors; the rest is carried to
// it.
class WeightsNode final : public SavingNode, public LaterPart {
 public:
  WeightsNode(c10::intrusive_ptr<GraphCall> call, CallSizes sizes)
      : call_(std::move(call)), sizes_(std::move(sizes)) {}

  std::string name() const override { return "CapturedWeights"; }
  // The tensor must not have the history of the other node, which leads to this one.
  void keep(const at::Tensor& tensor) { save(tensor); }
  void check_unwritten(const at::Tensor& tensor) { watch(tensor); }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& carrier) override;

 private:
  c10::intrusive_ptr<GraphCall> call_;
  CallSizes sizes_;
};

class CapturedNode final : public SavingNode {
 public:
  // `sizes`: those of dynamic dims in forward.
  CapturedNode(c10::intrusive_ptr<GraphCall> call, CallSizes sizes)
      : call_(std::move(call)), sizes_(std::move(sizes)) {}

  // Called after the results have their history. `values`: the results of the forward graph; `results`:
  // indexed like the forward outputs. `weights`: the second part, or null.
  void save_all(const std::vector<c10::IValue>& values, const std::vector<at::Tensor>& primals,
                const std::vector<at::Tensor>& results, WeightsNode* weights);

  // For a backward that is differentiated.
  void hold(const std::vector<at::Tensor>& primals);

  // An input that backward writes. It does not require a gradient, so holding it keeps no autograd graph
  // alive.
  void write_in_backward(const at::Tensor& input) { written_.push_back({input, input._version()}); }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  CarriedValues take_deferred(torch::autograd::variable_list& gradients) const;

  c10::intrusive_ptr<GraphCall> call_;
  CallSizes sizes_;
  struct Written {
    at::Tensor tensor;
    std::int64_t version = 0;  // at forward
  };
  std::vector<Written> written_;
};

}  // namespace penstock::graph
