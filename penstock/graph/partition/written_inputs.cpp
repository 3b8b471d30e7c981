#include "penstock/graph/partition/written_inputs.h"

#include <map>
#include <set>
#include <utility>

#include "penstock/base/describe.h"

namespace penstock::graph {
namespace {

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Copies of values in the memory of inputs that are about to be written, one for each value.
class CopiesBeforeWrites {
 public:
  CopiesBeforeWrites(Graph& graph, const std::vector<std::size_t>& written) : graph_(graph) {
    for (const std::size_t input : written) memory_.insert(graph[graph.inputs[input].value].storage);
  }

  ValueId instead_of(ValueId value) {
    if (value == kNoValue || !memory_.contains(graph_[value].storage)) return value;
    const auto [copy, is_new] = copies_.try_emplace(value, kNoValue);
    if (!is_new) return copy->second;
    Geometry geometry = graph_[value].geometry;
    geometry.storage_offset = 0;
    copy->second = graph_.new_value(std::move(geometry));
    graph_.nodes.push_back({operator_named("aten::clone"),
                            {Operand::of(value), Operand::of(c10::IValue())},
                            {Operand::of(copy->second)}});
    return copy->second;
  }

 private:
  Graph& graph_;
  std::set<StorageId> memory_;
  std::map<ValueId, ValueId> copies_;
};

}  // namespace

void write_inputs_in_graph(const JointGraph& joint, Graph& forward) {
  if (joint.written_in_graph.empty()) return;
  PENSTOCK_INVARIANT(forward.outputs.size() >= joint.forward_outputs, "a forward graph lacks outputs");
  const auto first = forward.outputs.begin() + static_cast<std::ptrdiff_t>(joint.forward_returns());
  const auto end = forward.outputs.begin() + static_cast<std::ptrdiff_t>(joint.forward_outputs);
  const std::vector<Operand> news(first, end);
  forward.outputs.erase(first, end);
  CopiesBeforeWrites copies(forward, joint.written_in_graph);
  for (Operand& output : forward.outputs)
    for (ValueId& value : output.values) value = copies.instead_of(value);
  std::vector<std::pair<ValueId, ValueId>> writes;  // to, from
  for (std::size_t i = 0; i < news.size(); ++i) {
    const ValueId input = forward.inputs[joint.written_in_graph[i]].value, value = news[i].value();
    if (value != input) writes.emplace_back(input, copies.instead_of(value));
  }
  for (const auto& [to, from] : writes)
    forward.nodes.push_back({operator_named("aten::copy_"),
                             {Operand::of(to), Operand::of(from), Operand::of(c10::IValue(false))},
                             {Operand::of(to)}});
  verify(forward);
}

}  // namespace penstock::graph
