// A program over tensors as a value: dispatcher operators in execution order, the tensors that flow between
// them, and the geometry of each tensor. graph_compiler.h passes graphs to compilers.
//
//   std::string first_product(const graph::Graph& graph) {
//     for (const graph::Node& node : graph.nodes)
//       if (node.op.operator_name().name == "aten::mm") return to_text(graph, node);
//     return {};
//   }
//
// As text (to_text) a graph is
//
//  graph(%0 x: float32[3, 4], %1 w: float32[4, 2]) {
//    %2: float32[3, 2] = aten::mm(%0, %1)
//    %3: float32[3, 2] = aten::relu(%2)
//    return (%3)
//  }
//
// Values. Each tensor has a ValueId; its geometry (sizes, strides, dtype, device) never changes. Values that
// share memory have the same StorageId; this is the only representation of aliasing. A graph may contain
// operators that write memory ("mul_"): the result of such a node is the written value itself, and all values
// of that storage change with it. If the write changes the geometry (transpose_, resize_), the result is a
// new value of the same storage, and the old one is not used again. Graphs that compilers receive have no
// operators that write.
//
// Inputs come first, then nodes in order; constants are tensors that the program found in its environment.
//
// Sizes that are known only when the graph is called (compile_options.h) are symbols: geometries and
// constants that depend on them refer to expressions in the graph's table and hold their values for one
// example of sizes. Thread safety: that of a standard container.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/tensor_subclass.h"

namespace penstock::graph {

class SymbolicTable;

// Index of an expression in the symbolic table.
using SymbolicId = std::int32_t;
// Of what depends on no symbol.
inline constexpr SymbolicId kNotSymbolic = -1;

// Identifies a value: its index in Graph::values.
enum class ValueId : std::int32_t {};
// Identifies memory that values share.
enum class StorageId : std::int32_t {};
// An undefined tensor, or a missing one.
inline constexpr ValueId kNoValue{-1};
// Returns the index of a value in Graph::values.
inline constexpr std::size_t index_of(ValueId value) { return static_cast<std::size_t>(value); }
// Returns a storage as an index, from 0 to Graph::storages - 1.
inline constexpr std::size_t index_of(StorageId storage) { return static_cast<std::size_t>(storage); }

// Describes a tensor without its data.
struct Geometry : StridedLayout {
  at::ScalarType dtype = at::kFloat;  // element type
  at::Device device = at::kCPU;       // where the memory is
  bool conjugated = false;            // lazy (conj()): the memory holds the conjugated values
  bool negated = false;               // lazy (imag() of a conjugate): the memory holds the negated values
  // Index of a geometry in the table; sizes, strides and offset are then an example.
  SymbolicId symbolic = kNotSymbolic;

  // Whether all members are equal.
  bool operator==(const Geometry&) const = default;
  // Returns the number of elements.
  std::int64_t numel() const;
};

// A tensor of the program.
struct Value {
  Geometry geometry;    // its sizes, strides, dtype and device
  StorageId storage{};  // its memory
};

// One argument or result of an operator: a constant, or tensors.
struct Operand {
  // What it is. Tensors are values of the graph, everything else is a constant.
  enum class Kind : std::uint8_t { Constant, Tensor, TensorList, OptionalTensorList };
  Kind kind = Kind::Constant;           // what it is
  c10::IValue constant;                 // of a Constant
  c10::SmallVector<ValueId, 2> values;  // kNoValue: an undefined tensor or a missing element
  SymbolicId symbolic = kNotSymbolic;   // index of a constant in the table; `constant` is then an example

  // Returns a constant operand.
  static Operand of(c10::IValue constant) { return {Kind::Constant, std::move(constant), {}, kNotSymbolic}; }
  // Returns a tensor operand.
  static Operand of(ValueId value) { return {Kind::Tensor, {}, {value}, kNotSymbolic}; }
  // Returns the value of a Tensor, kNoValue for other kinds.
  ValueId value() const { return kind == Kind::Tensor ? values[0] : kNoValue; }
};

// Which half of a training step a node belongs to.
enum class Phase : std::uint8_t { Forward, Backward };

// One call of an operator.
struct Node {
  c10::OperatorHandle op;          // what is called
  std::vector<Operand> arguments;  // one for each argument of the schema
  // One for each return of the schema; Constant for those that are not tensors.
  std::vector<Operand> results;
  Phase phase = Phase::Forward;  // the half it belongs to
  bool grad_enabled = true;      // grad mode during recording
};

// An input of the graph.
struct Placeholder {
  ValueId value = kNoValue;  // its value
  std::string name;          // "0.weight", "args[0]"
};

// A tensor that the program found in its environment.
struct ConstantTensor {
  ValueId value = kNoValue;            // its value
  at::Tensor tensor;                   // the tensor itself
  SymbolicId symbolic = kNotSymbolic;  // index of a tensor in the table; `tensor` is then an example
};

// The program.
struct Graph {
  std::vector<Placeholder> inputs;             // in the order in which a call passes them
  std::vector<ConstantTensor> constants;       // found tensors
  std::vector<Node> nodes;                     // in execution order
  std::vector<Operand> outputs;                // Tensor or Constant: numbers, text and None pass through
  std::vector<Value> values;                   // by ValueId
  std::int32_t storages = 0;                   // number of StorageIds
  std::shared_ptr<const SymbolicTable> table;  // null if all sizes are fixed

  // Returns a value by its id.
  const Value& operator[](ValueId value) const { return values[index_of(value)]; }
  // Adds a storage.
  StorageId new_storage() { return StorageId{storages++}; }
  // Adds a value in the given storage.
  ValueId new_value(Geometry geometry, StorageId storage);
  // Adds a value in a storage of its own.
  ValueId new_value(Geometry geometry) { return new_value(std::move(geometry), new_storage()); }
};

// ---- facts about nodes ----

// Calls `visit(ValueId)` for each tensor among operands, skipping missing ones.
template <class Operands, class Visit>
void for_each_value(const Operands& operands, Visit&& visit) {
  for (const Operand& operand : operands)
    for (const ValueId value : operand.values)
      if (value != kNoValue) visit(value);
}

// Returns the positions of the arguments that a node writes, according to its schema and, for operators whose
// schema does not declare it (the running statistics of batch norm), to a table.
std::vector<std::size_t> written_arguments(const Node& node);
// Returns whether the node writes any argument.
bool writes(const Node& node);
// Returns whether the node draws from a random generator of the process, or reads or sets its state. Fused
// attention draws only if its probability of dropout is not 0.
bool is_random(const Node& node);
// Returns whether the node has a visible effect besides its results: a collective, for which other processes
// wait, and any operator that returns nothing. Such nodes run exactly once and in order, whether or not their
// results are used. register_side_effect adds operators (compile_options.h).
bool has_side_effect(const Node& node);
// Returns the effect of a node with a side effect: "ordered", or the one it was registered with. Nodes of one
// effect keep their order.
std::string effect_of(const Node& node);
// Returns whether the node must run even if its results are unused.
inline bool must_run(const Node& node) { return is_random(node) || has_side_effect(node); }

// ---- whole graphs ----

// Throws InvariantError for the first violation of the rules at the top of this file: operands used before
// they are defined, values defined twice, counts that differ from the schema, results that share no memory
// although the schema says so, symbols without a table.
void verify(const Graph& graph);

// Removes nodes whose results are unused. Keeps nodes that write visible memory, draw random numbers or have
// side effects. Returns the number of removed nodes.
std::size_t remove_dead_nodes(Graph& graph);

// Returns the graph as text.
std::string to_text(const Graph& graph);
// Returns one node as text.
std::string to_text(const Graph& graph, const Node& node);

}  // namespace penstock::graph
