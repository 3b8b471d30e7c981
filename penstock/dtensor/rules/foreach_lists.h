// The tensors of an operator on lists, position by position, for rules_foreach.cpp. Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/sharding_rule.h"

namespace penstock::detail {

// Pops the arguments off the stack and redistributes the tensors of every position to the placements of the
// first list's.
class ForeachCall {
 public:
  // `partial_allowed`: the operator is linear in all its lists, so partial sums may stay partial.
  ForeachCall(const c10::OperatorHandle& op, Stack* stack, bool partial_allowed);

  const std::vector<at::Tensor>& first_list() const { return first_; }
  // The spec that a position is computed in; null for plain tensors.
  const SpecPtr& spec(std::size_t position) const { return specs_[position]; }
  const comm::MeshGroups& mesh(std::size_t position) const { return dtensor_payload(first_[position])->mesh; }

  // The local arguments for the call.
  Stack local;

  // Wraps a local result of a position as a distributed tensor.
  at::Tensor wrap(const at::Tensor& result, std::size_t position) const;

 private:
  at::Tensor localize(const at::Tensor& tensor, std::size_t position, bool written, bool may_be_lost);

  const OperatorTraits& traits_;
  std::vector<at::Tensor> first_;
  std::vector<SpecPtr> specs_;
};

}  // namespace penstock::detail
