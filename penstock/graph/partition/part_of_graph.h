// A part of a graph as a separate graph. Private to this folder.
//
//   PartOfGraph part(graph, 2);
//   part.add_input(value, "saved_3");
//   part.add_node(graph.nodes[4]);
//   part.add_node(graph.nodes[7]);
//   part.add_output(graph.outputs[0]);
//   Graph result = part.finish();                  // values are numbered in the order of their first use
//
// Thread safety: that of a standard container.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// A part of a graph as a separate graph: some nodes in order, with the values they need from outside as
// inputs.
class PartOfGraph {
 public:
  PartOfGraph(const Graph& from, std::size_t nodes)
      : from_(from),
        new_ids_(from.values.size(), kNoValue),
        new_storages_(static_cast<std::size_t>(from.storages), -1) {
    for (const ConstantTensor& constant : from.constants) constants_.emplace(constant.value, constant);
    to_.table = from.table;
    to_.nodes.reserve(nodes);
  }

  void add_input(ValueId old, std::string name) { to_.inputs.push_back({map(old), std::move(name)}); }
  void add_node(const Node& node) {
    add_node(node, [](ValueId) { return true; });
  }
  // Results of a recomputed node that are already available are dropped.
  void add_node(const Node& node, const std::vector<char>& at_hand) {
    add_node(node, [&](ValueId value) { return !at_hand[index_of(value)]; });
  }
  void add_output(const Operand& output) { to_.outputs.push_back(map(output)); }

  // By value of the new graph.
  std::vector<ValueId> take_old_ids() { return std::move(old_ids_); }
  Graph finish() {
    verify(to_);
    return std::move(to_);
  }

 private:
  template <class Keeps>
  void add_node(const Node& node, const Keeps& keeps_result) {
    Node& copied = to_.nodes.emplace_back(Node{node.op, {}, {}, node.phase, node.grad_enabled});
    copied.arguments = map(node.arguments);
    copied.results = node.results;
    for (Operand& result : copied.results)
      for (ValueId& value : result.values)
        if (value != kNoValue) value = keeps_result(value) ? map(value) : kNoValue;
  }
  ValueId map(ValueId old) {
    ValueId& value = new_ids_[index_of(old)];
    if (value == kNoValue) {
      std::int32_t& storage = new_storages_[index_of(from_[old].storage)];
      if (storage < 0) storage = static_cast<std::int32_t>(to_.new_storage());
      value = to_.new_value(from_[old].geometry, StorageId{storage});
      old_ids_.push_back(old);
      if (constants_.empty()) return value;
      if (const auto constant = constants_.find(old); constant != constants_.end())
        to_.constants.push_back({value, constant->second.tensor, constant->second.symbolic});
    }
    return value;
  }
  Operand map(const Operand& operand) {
    Operand result = operand;
    map_values(result);
    return result;
  }
  std::vector<Operand> map(const std::vector<Operand>& operands) {
    std::vector<Operand> result = operands;
    for (Operand& operand : result) map_values(operand);
    return result;
  }
  void map_values(Operand& operand) {
    for (ValueId& value : operand.values)
      if (value != kNoValue) value = map(value);
  }

  const Graph& from_;
  Graph to_;
  std::vector<ValueId> new_ids_, old_ids_;
  std::vector<std::int32_t> new_storages_;
  std::map<ValueId, ConstantTensor> constants_;
};

}  // namespace penstock::graph
