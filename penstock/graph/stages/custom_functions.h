// Finds the user-defined autograd functions that a traced forward called, and records their backwards.
//
//   HistoryOfValues history;
//   tracer.seen = [&](const at::Tensor& tensor, ValueId value) { history.note(tensor, value); };
//   outputs = function(inputs);
//   functions = record_custom_functions(tracer, history);
//
// Private to this folder. Thread safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "penstock/graph/stages/forward_trace.h"
#include "penstock/graph/trace/tracer.h"

namespace penstock::graph {

// Which value each place of the autograd graph is, and which values require a gradient.
class HistoryOfValues {
 public:
  // Called when a tensor is made, without history yet, and each time it is used.
  void note(const at::Tensor& tensor, ValueId value);
  // After the forward: looks at all tensors again.
  void finish();

  // kNoValue for a place that no operator has seen.
  ValueId value_at(const torch::autograd::Edge& edge) const;
  bool requires_grad(ValueId value) const {
    return index_of(value) < requires_grad_.size() && requires_grad_[index_of(value)] != 0;
  }
  const std::vector<torch::autograd::Edge>& places() const { return held_; }

 private:
  void note_place(const at::Tensor& tensor, ValueId value);

  // Fake tensors, whose memory is not there: holding them costs nothing. A tensor that is made is the one
  // that gets the history.
  std::vector<std::pair<at::Tensor, ValueId>> made_;
  std::vector<char> known_, requires_grad_;  // by value
  std::map<std::pair<const torch::autograd::Node*, std::uint32_t>, ValueId> value_at_;
  std::vector<torch::autograd::Edge> held_;  // keeps the nodes alive
};

// Appends the backwards to the tracer's graph as inputs and nodes of Phase::Backward, and takes them out
// again: afterwards the graph has its inputs and nodes of before, and the values of the backwards too. Call
// it under the tracer and its fake mode. Throws NotImplemented for a function that writes its arguments, or
// takes a tensor whose value is not known.
std::vector<CustomFunction> record_custom_functions(Tracer& tracer, const HistoryOfValues& history);

}  // namespace penstock::graph
