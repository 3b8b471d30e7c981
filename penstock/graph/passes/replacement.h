// What the passes that replace values share: which memory is visible outside of a graph, and values that
// stand for others.
//
//   Replacement replaced(graph);
//   for (Node& node : graph.nodes) {
//     replaced.translate(node.arguments);
//     if (...) replaced.put(source, /*instead of*/ result);   // and leave the node out
//   }
//   replaced.finish();
//
// Private to this folder. Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "penstock/graph.h"
#include "penstock/graph_pass.h"

namespace penstock::graph {

// Which memory is that of an input, a constant or an output.
class VisibleMemory {
 public:
  explicit VisibleMemory(const Graph& graph);
  bool is_output(ValueId value) const { return is_output_[index_of(value)] != 0; }
  bool in_output(const Graph& graph, ValueId value) const { return has(graph, value, kOutput); }
  bool in_anything(const Graph& graph, ValueId value) const { return has(graph, value, kOutput | kGiven); }

  // Whether a tensor that an operator made anew may be replaced by another one with the same elements, so
  // that both are in one memory from then on. Never if it is in an output: who holds the one would then see
  // what is written to the other. In a graph that is split afterwards, `by` must not be visible either: what
  // is saved for backward would be in memory that the program may write before, which autograd refuses.
  bool may_put(const Graph& graph, PassRole role, ValueId by, ValueId instead_of) const {
    return !in_output(graph, instead_of) && !(role == PassRole::Joint && in_anything(graph, by));
  }

 private:
  static constexpr std::uint8_t kOutput = 1, kGiven = 2;
  bool has(const Graph& graph, ValueId value, int what) const {
    const std::size_t storage = index_of(graph[value].storage);
    return storage < memory_.size() && (memory_[storage] & what) != 0;
  }
  std::vector<std::uint8_t> memory_;     // by storage
  std::vector<std::uint8_t> is_output_;  // by value
};

class Replacement {
 public:
  // The graph must exist as long as this object; nodes and outputs may change, values must not be added.
  explicit Replacement(Graph& graph);
  // Replaced values, in arguments.
  void translate(std::vector<Operand>& operands) const;
  ValueId now(ValueId value) const { return value == kNoValue ? value : stands_for_[index_of(value)]; }
  // `by` must not have been replaced itself. What is in the memory of `instead_of` is in that of `by` then.
  void put(ValueId by, ValueId instead_of);
  // Brings outputs and storages up to date.
  void finish();

 private:
  std::int32_t root_of(std::int32_t storage) const;
  Graph& graph_;
  std::vector<ValueId> stands_for_;   // by value
  std::vector<std::int32_t> joined_;  // by storage: the one that it is part of; empty until needed
};

// Numbers each operator of a table by its place in it, -1 for all others; looked up once for each operator.
class OperatorNumbers {
 public:
  // "aten::mul.Tensor". Must be a constant of the program.
  template <std::size_t count>
  explicit OperatorNumbers(const std::string_view (&names)[count]) : names_(names), count_(count) {}
  int of(const c10::OperatorHandle& op) const;

 private:
  const std::string_view* names_;
  std::size_t count_;
  mutable std::vector<std::int16_t> known_;  // by operator_index(); -2: not known yet
};

// Whether a geometry that was found equal to another one is equal for all sizes: it depends on no symbol, or
// all of it is known.
bool holds_for_all_sizes(const Graph& graph, const Geometry& geometry);

// Removes the nodes that are marked.
void erase_nodes(Graph& graph, const std::vector<char>& gone);

}  // namespace penstock::graph
