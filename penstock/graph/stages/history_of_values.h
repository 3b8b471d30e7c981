// The history that autograd keeps of the tensors of a recording: which value each place of the autograd graph
// is, which values require a gradient, and which tensors have lost the history of their value.
//
//   HistoryOfValues history(tracer.graph, modules);
//   tracer.seen = [&](const at::Tensor& tensor, ValueId value) { return history.note(tensor, value); };
//   outputs = function(inputs);
//   history.finish();
//
// data() and detach_() take the history of a tensor away without an operator, and the tensor is still the
// same value. A replay would differentiate through it, so that an aten::detach is recorded for such a tensor.
//
// Private to this folder. Thread safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/stages/module_recorder.h"

namespace penstock::graph {

class HistoryOfValues {
 public:
  // Appends nodes to the graph. `modules`: for messages.
  HistoryOfValues(Graph& graph, const ModuleRecorder& modules) : graph_(graph), modules_(modules) {}

  // Called when a tensor is made, without history yet, and each time it is used. Returns the value to record
  // for it: a new one, the result of an aten::detach, if it has lost the history of its value. Throws
  // NotImplemented, with the module, for a tensor with the history of another value (set_data).
  ValueId note(const at::Tensor& tensor, ValueId value);
  // After the forward: looks at all tensors again.
  void finish();

  // kNoValue for a place that no operator has seen.
  ValueId value_at(const torch::autograd::Edge& edge) const;
  bool requires_grad(ValueId value) const {
    return index_of(value) < requires_grad_.size() && requires_grad_[index_of(value)] != 0;
  }
  // All nodes that the gradients of the forward may pass.
  std::vector<torch::autograd::Node*> nodes() const;

  // Called when the inputs have been noted: their hooks are not the forward's.
  void note_hooks();
  // After finish(): a value whose gradient goes to a hook that the forward has set, kNoValue if it is not
  // known which; empty without such a hook.
  std::optional<ValueId> hooked() const;

 private:
  void make_room_for(ValueId value);
  void note_place(const at::Tensor& tensor, ValueId value);
  bool is_handle(const at::Tensor& tensor, ValueId value) const;
  void refuse_other_history(const at::Tensor& tensor, ValueId value) const;
  bool has_lost_history(const at::Tensor& tensor, ValueId value) const;
  bool was_detached_in_place(const at::Tensor& tensor, ValueId value) const;
  ValueId detach(const at::Tensor& tensor, ValueId noted, ValueId value);

  // What is recorded for a tensor without the history of its value.
  struct Detached {
    ValueId noted;  // its value as others know it; otherwise it has become another tensor since
    ValueId value;
  };

  Graph& graph_;
  const ModuleRecorder& modules_;
  // By value: the tensors that are this value. They are fake, without memory: holding them costs nothing. The
  // one that is made gets the history later.
  std::vector<std::vector<at::Tensor>> handles_;
  std::vector<char> requires_grad_, has_history_;                  // by value
  std::unordered_map<const c10::TensorImpl*, Detached> detached_;  // all are handles
  std::map<std::pair<const torch::autograd::Node*, std::uint32_t>, ValueId> value_at_;
  std::vector<torch::autograd::Edge> held_;                    // keeps the nodes alive
  std::unordered_map<const void*, std::size_t> hooks_before_;  // by node, and by leaf
};

}  // namespace penstock::graph
