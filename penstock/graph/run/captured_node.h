// The autograd node of a whole captured function: holds what forward saved, and runs the backward graph.
//
// Created by GraphCall. Its gradients are in the order of the capture's tangents.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "penstock/graph/run/graph_call.h"
#include "penstock/graph/run/saving_node.h"

namespace penstock::graph {

class CapturedNode final : public SavingNode {
 public:
  // `sizes`: those of dynamic dims in forward.
  CapturedNode(c10::intrusive_ptr<GraphCall> call, CallSizes sizes)
      : call_(std::move(call)), sizes_(std::move(sizes)) {}

  // Called after the results have their history. `values`: the results of the forward graph; `results`:
  // indexed like the forward outputs.
  void save_all(const std::vector<c10::IValue>& values, const std::vector<at::Tensor>& primals,
                const std::vector<at::Tensor>& results);

  // For a backward that is differentiated.
  void hold(const std::vector<at::Tensor>& primals);

  // An input that backward writes. It does not require a gradient, so holding it keeps no autograd graph
  // alive.
  void write_in_backward(const at::Tensor& input) { written_.push_back({input, input._version()}); }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  c10::intrusive_ptr<GraphCall> call_;
  CallSizes sizes_;
  struct Written {
    at::Tensor tensor;
    std::int64_t version = 0;  // at forward
  };
  std::vector<Written> written_;
};

}  // namespace penstock::graph
