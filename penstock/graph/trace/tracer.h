// Records what a function does to tensors: a mode over fake tensors that records each operator as a node.
//
//   FakeMode fake;
//   Tracer tracer;
//   const at::Tensor x = tracer.add_input(to_fake(real), "x");
//   {
//     const ModeGuard below(fake);
//     const ModeGuard on(tracer);
//     const at::Tensor y = x.relu().sum();
//     tracer.graph.outputs.push_back(Operand::of(tracer.value_of(y)));
//   }
//
// Recording happens below autograd and autocast: composite operators are recorded as their parts, views and
// in-place operators as they are, backward as further operators. Nothing is computed. Real tensors that a
// recorded operator takes become constants of the graph, and a StateError if they require a gradient; numbers
// wrapped in tensors stay numbers. Operators on real tensors alone are run and not recorded unless they
// write: their results are as constant as their arguments.
//
// A tensor subclass is flattened: its handler runs, and the operators it calls are recorded.
//
// Operators that give a tensor other memory or another size of it (set_, resize_) are recorded as views:
// afterwards the tensor is a view of the memory of its source, or of its own, without a write. set_ takes a
// tensor without a gradient; resize_ must not need more memory than the tensor occupies.
//
// An operator whose result depends on values throws DataDependentError, which says from which inputs the
// values come and which parameter was used last.
//
// Tensors are identified by the note they carry, not by handle: the copies that autograd saves are the same
// value.
// Thread safety: operators must come from one thread at a time, as they do when backward runs for one device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/trace/decompositions.h"
#include "penstock/mode.h"
#include "penstock/operator_traits.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/fake/fake_note.h"

namespace penstock::graph {

class Tracer final : public Mode {
 public:
  // Takes a fake tensor that no recorded operator has produced. Throws TypeError for any other.
  at::Tensor add_input(at::Tensor fake, std::string name);

  // Returns the value of a tensor; a real tensor that is not known yet becomes a constant. Throws StateError
  // for a fake tensor that was created outside the recording.
  ValueId value_of(const at::Tensor& tensor);
  // Returns the storage of a tensor that has a value.
  StorageId storage_of(const at::Tensor& tensor);
  // Returns a tensor's value, or any other value unchanged.
  Operand operand_of(const c10::IValue& value);

  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;
  bool records() const override { return true; }

  // The first `found` inputs are parameters and buffers, for messages.
  std::size_t found = 0;
  std::shared_ptr<const DecompositionTable> decompositions;  // null: none
  // Called with a tensor each time an operator takes or makes it, when it has its value. May be empty. A
  // result has no history yet when it is made. Returns the value to record for a tensor that is taken, which
  // may be the result of a node that it has appended.
  std::function<ValueId(const at::Tensor& tensor, ValueId value)> seen;

  Graph graph;
  Phase phase = Phase::Forward;  // the phase of nodes recorded from now on

 private:
  Operand argument_of(ArgumentTraits::Kind kind, const c10::IValue& value);
  void check_constant(const at::Tensor& tensor) const;
  void check_subclass_constant(const at::Tensor& tensor) const;
  Operand record_result(const ReturnAlias& alias, const c10::IValue& value, const Node& node);
  ValueId define(const at::Tensor& tensor, StorageId storage);
  ValueId rewritten(const at::Tensor& tensor);
  StorageId new_storage(const at::Tensor& tensor);
  StorageId storage_of_result(const at::Tensor& tensor, const Node& node);
  struct Arguments;
  void run_below(const c10::OperatorHandle& op, Stack* stack);
  // Records set_ and resize_. Returns false for any other operator.
  bool rebind(const c10::OperatorHandle& op, Stack* stack, std::size_t base);
  void set_memory(const at::Tensor& tensor, const at::Tensor& source);
  void record_view(const c10::OperatorHandle& op, const at::Tensor& of, const at::Tensor& like,
                   Operand result);
  // Records what a decomposition calls.
  void expand(const c10::OperatorHandle& op, const Decomposition& decomposition, Stack* stack,
              std::size_t base);
  std::string origin_of_values(const Node& node) const;

  // A fake tensor carries a note with its value, so that the tracer keeps nothing alive that the function
  // releases. Other tensors are held, so that no address is reused during the recording.
  const std::uint64_t note_owner_ = new_note_owner();
  std::unordered_map<const void*, ValueId> others_;
  std::unordered_map<const c10::StorageImpl*, StorageId> storages_of_others_;
  std::vector<PayloadPtr> held_payloads_;
  std::vector<at::Tensor> held_tensors_;
  std::vector<c10::Storage> held_storages_;
  std::vector<c10::OperatorName> expanding_;              // operators whose decomposition is running
  std::size_t first_result_ = 0;                          // of the node being recorded
  std::vector<const c10::StorageImpl*> storage_address_;  // by StorageId; the storage may no longer exist
};

}  // namespace penstock::graph
