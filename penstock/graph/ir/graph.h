// A program over tensors as a value: dispatcher operators in execution order, the tensors that flow between
// them, and the geometry of each tensor.
//
//   graph(%0 x: float32[3, 4], %1 w: float32[4, 2]) {
//     %2: float32[3, 2] = aten::mm(%0, %1)
//     %3: float32[3, 2] = aten::relu(%2)
//     return (%3)
//   }
//
// Values. Each tensor has a ValueId; its geometry (sizes, strides, dtype, device) never changes. Values that
// share memory have the same StorageId; this is the only representation of aliasing. A graph may contain
// operators that write memory ("mul_"): the result of such a node is the written value itself, and all values
// of that storage change with it. If the write changes the geometry (transpose_, resize_), the result is a
// new value of the same storage, and the old one is not used again. functionalize() turns such a graph into
// one without writes.
//
// Inputs come first, then nodes in order; constants are tensors that the program found in its environment.
//
// Sizes that are known only when the graph is called (compile_options.h) are symbols: geometries and
// constants that depend on them refer to expressions in the graph's table (symbolic_table.h) and hold their
// values for one example of sizes. Thread safety: that of a standard container.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>
#include "penstock/tensor_subclass.h"

namespace penstock::graph {

class SymbolicTable;

// Index of an expression in the symbolic table.
using SymbolicId = std::int32_t;
inline constexpr SymbolicId kNotSymbolic = -1;

enum class ValueId : std::int32_t {};
enum class StorageId : std::int32_t {};
inline constexpr ValueId kNoValue{-1};
inline constexpr std::size_t index_of(ValueId value) { return static_cast<std::size_t>(value); }
inline constexpr std::size_t index_of(StorageId storage) { return static_cast<std::size_t>(storage); }

// Describes a tensor without its data.
struct Geometry : StridedLayout {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  // Lazy (conj(), imag() of a conjugate): the memory holds the conjugated or negated values.
  bool conjugated = false, negated = false;
  // Index of a geometry in the table; sizes, strides and offset are then an example.
  SymbolicId symbolic = kNotSymbolic;

  bool operator==(const Geometry&) const = default;
  std::int64_t numel() const;
};

Geometry geometry_of(const at::Tensor& tensor);
bool has_geometry(const at::Tensor& tensor, const Geometry& geometry);
// Whether two elements share a place in memory (expand, unfold). Exact up to a million elements; above that
// it may return true for tensors without overlap.
bool overlaps_itself(const Geometry& geometry);

struct Value {
  Geometry geometry;
  StorageId storage{};
};

// One argument or result of an operator: a constant, or tensors.
struct Operand {
  enum class Kind : std::uint8_t { Constant, Tensor, TensorList, OptionalTensorList };
  Kind kind = Kind::Constant;
  c10::IValue constant;                 // of a Constant
  c10::SmallVector<ValueId, 2> values;  // kNoValue: an undefined tensor or a missing element
  SymbolicId symbolic = kNotSymbolic;   // index of a constant in the table; `constant` is then an example

  static Operand of(c10::IValue constant) { return {Kind::Constant, std::move(constant), {}, kNotSymbolic}; }
  static Operand of(ValueId value) { return {Kind::Tensor, {}, {value}, kNotSymbolic}; }
  ValueId value() const { return kind == Kind::Tensor ? values[0] : kNoValue; }
};

// Which half of a training step a node belongs to.
enum class Phase : std::uint8_t { Forward, Backward };

struct Node {
  c10::OperatorHandle op;
  std::vector<Operand> arguments;  // one for each argument of the schema
  // One for each return of the schema; Constant for those that are not tensors.
  std::vector<Operand> results;
  Phase phase = Phase::Forward;
  bool grad_enabled = true;  // grad mode during recording
};

struct Placeholder {
  ValueId value = kNoValue;
  std::string name;
};

struct ConstantTensor {
  ValueId value = kNoValue;
  at::Tensor tensor;
  SymbolicId symbolic = kNotSymbolic;  // index of a tensor in the table; `tensor` is then an example
};

struct Graph {
  std::vector<Placeholder> inputs;
  std::vector<ConstantTensor> constants;
  std::vector<Node> nodes;
  std::vector<Operand> outputs;                // Tensor or Constant: numbers, text and None pass through
  std::vector<Value> values;                   // by ValueId
  std::int32_t storages = 0;                   // number of StorageIds
  std::shared_ptr<const SymbolicTable> table;  // null if all sizes are fixed

  const Value& operator[](ValueId value) const { return values[index_of(value)]; }
  StorageId new_storage() { return StorageId{storages++}; }
  ValueId new_value(Geometry geometry, StorageId storage);
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
bool writes(const Node& node);
// Whether the node draws from a random generator.
bool is_random(const Node& node);
// Whether the node has a visible effect besides its results: a collective, for which other processes wait,
// and any operator that returns nothing. Such nodes run exactly once and in order, whether or not their
// results are used.
bool has_side_effect(const Node& node);  // register_side_effect adds operators (compile_options.h)
inline bool must_run(const Node& node) { return is_random(node) || has_side_effect(node); }
std::size_t count_writes(const Graph& graph);

// ---- whole graphs ----

// Throws InvariantError for the first violation of the rules at the top of this file: operands used before
// they are defined, values defined twice, counts that differ from the schema, results that share no memory
// although the schema says so, symbols without a table.
void verify(const Graph& graph);

// Removes nodes whose results are unused. Keeps nodes that write visible memory, draw random numbers or have
// side effects. Returns the number of removed nodes.
std::size_t remove_dead_nodes(Graph& graph);

std::string to_text(const Graph& graph);
// "float32[3, 4]", with strides, offset and device if they are not the defaults; with a table "float32[B,
// 4]".
std::string to_text(const Geometry& geometry, const SymbolicTable* table = nullptr);
std::string to_text(const Operand& operand,
                    const SymbolicTable* table = nullptr);  // "%3", "[%3, none]", "0.5"
std::string to_text(const Graph& graph, const Node& node);

}  // namespace penstock::graph
