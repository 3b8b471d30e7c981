// A program over tensors as a value: operators of the dispatcher in the order they run, what flows between them, and what is
// known of each tensor without running anything.
//
//   graph(%0 x: float32[3, 4], %1 w: float32[4, 2]) {
//     %2: float32[3, 2] = aten::mm(%0, %1)
//     %3: float32[3, 2] = aten::relu(%2)
//     return (%3)
//   }
//
// Values. Each tensor that flows has a ValueId; its geometry (sizes, strides, dtype, device) never changes. Values that share
// memory have the same StorageId: that is all there is to know about aliasing. A graph may hold operators that write memory
// ("mul_"): the result of such a node is the written value itself, and all values of that storage change with it. When writing
// changes the geometry (transpose_, resize_), the result is a new value of the same storage, and the old one is not used again.
// functionalize() turns such a graph into one without writes.
//
// Inputs come first, then nodes in order; constants are tensors that the program found in its surroundings.
//
// Sizes that are known only when the graph is called (dynamic_dims.h) are symbols: geometries and constants that depend on them say where their
// expressions stand in the graph's table (symbolic_table.h), and hold what they are at one example of sizes.
// Thread rule: as for a standard container.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace penstock::graph {

class SymbolicTable;

// The place of an expression in the table of symbols.
using SymbolicId = std::int32_t;
inline constexpr SymbolicId kNotSymbolic = -1;

enum class ValueId : std::int32_t {};
enum class StorageId : std::int32_t {};
inline constexpr ValueId kNoValue{-1};
inline constexpr std::size_t index_of(ValueId value) { return static_cast<std::size_t>(value); }
inline constexpr std::size_t index_of(StorageId storage) { return static_cast<std::size_t>(storage); }

// What is known of a tensor before it exists.
struct Geometry {
  c10::SmallVector<std::int64_t, 5> sizes, strides;
  std::int64_t storage_offset = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool conjugated = false, negated = false;  // lazily (conj(), imag() of a conjugate): the memory holds the conjugates or negatives of the values
  SymbolicId symbolic = kNotSymbolic;      // of a geometry of the table; sizes, strides and offset are an example then

  bool operator==(const Geometry&) const = default;
  std::int64_t numel() const;
};

Geometry geometry_of(const at::Tensor& tensor);
bool has_geometry(const at::Tensor& tensor, const Geometry& geometry);
// Two elements are at one place of the memory (expand, unfold). Exact up to a million elements; above that it may say so where it is not.
bool overlaps_itself(const Geometry& geometry);

struct Value {
  Geometry geometry;
  StorageId storage{};
};

// One argument or result of an operator: a plain value known now, or tensors that flow.
struct Operand {
  enum class Kind : std::uint8_t { Constant, Tensor, TensorList, OptionalTensorList };
  Kind kind = Kind::Constant;
  c10::IValue constant;                    // of a Constant
  c10::SmallVector<ValueId, 2> values;     // kNoValue: an undefined tensor or a missing element
  SymbolicId symbolic = kNotSymbolic;      // of a constant of the table; `constant` is an example then

  static Operand of(c10::IValue constant) { return {Kind::Constant, std::move(constant), {}, kNotSymbolic}; }
  static Operand of(ValueId value) { return {Kind::Tensor, {}, {value}, kNotSymbolic}; }
  ValueId value() const { return kind == Kind::Tensor ? values[0] : kNoValue; }
};

// Which half of a training step a node belongs to.
enum class Phase : std::uint8_t { Forward, Backward };

struct Node {
  c10::OperatorHandle op;
  std::vector<Operand> arguments;  // as many as the schema has
  std::vector<Operand> results;    // as many as the schema returns; Constant for what is not a tensor
  Phase phase = Phase::Forward;
  bool grad_enabled = true;        // grad mode while it was recorded
};

struct Placeholder {
  ValueId value = kNoValue;
  std::string name;
};

struct ConstantTensor {
  ValueId value = kNoValue;
  at::Tensor tensor;
  SymbolicId symbolic = kNotSymbolic;  // of a tensor of the table; `tensor` is an example then
};

struct Graph {
  std::vector<Placeholder> inputs;
  std::vector<ConstantTensor> constants;
  std::vector<Node> nodes;
  std::vector<Operand> outputs;   // Tensor or Constant: numbers, text and None pass through
  std::vector<Value> values;      // by ValueId
  std::int32_t storages = 0;      // how many StorageIds there are
  std::shared_ptr<const SymbolicTable> table;  // of the symbols; none when all sizes are fixed

  const Value& operator[](ValueId value) const { return values[index_of(value)]; }
  StorageId new_storage() { return StorageId{storages++}; }
  ValueId new_value(Geometry geometry, StorageId storage);
  ValueId new_value(Geometry geometry) { return new_value(std::move(geometry), new_storage()); }
};

// ---- facts about nodes ----

// Calls `visit(ValueId)` for each tensor among operands, missing ones left out.
template <class Operands, class Visit>
void for_each_value(const Operands& operands, Visit&& visit) {
  for (const Operand& operand : operands)
    for (const ValueId value : operand.values)
      if (value != kNoValue) visit(value);
}

// The arguments that a node writes, by its schema and, for operators whose schema conceals it (the running statistics of batch
// norm), by a table: positions among its arguments.
std::vector<std::size_t> written_arguments(const Node& node);
bool writes(const Node& node);
// Draws from a random generator.
bool is_random(const Node& node);
// Does something that others notice besides what it returns: a collective, for which other processes wait, and whatever returns nothing.
// Such nodes run once each and in their order, whether or not anybody uses what they give.
bool has_side_effect(const Node& node);
// For operators of your own ("mine::send"). Thread safe.
void register_side_effect(const std::string& op);
inline bool must_run(const Node& node) { return is_random(node) || has_side_effect(node); }
std::size_t count_writes(const Graph& graph);

// ---- whole graphs ----

// Throws InvariantError for the first thing that is not as the head of this file says: operands not defined before they are
// used, values defined twice, counts that differ from the schema, results that share memory with nothing although the schema
// says so, symbols without a table.
void verify(const Graph& graph);

// Takes out the nodes whose results nobody uses. Nodes that write memory somebody may see, draw random numbers or have side effects stay.
// Returns how many went.
std::size_t remove_dead_nodes(Graph& graph);

std::string to_text(const Graph& graph);
// "float32[3, 4]", with strides, offset and device where they are not the usual ones; with a table "float32[B, 4]".
std::string to_text(const Geometry& geometry, const SymbolicTable* table = nullptr);
std::string to_text(const Operand& operand, const SymbolicTable* table = nullptr);    // "%3", "[%3, none]", "0.5"
std::string to_text(const Graph& graph, const Node& node);

}  // namespace penstock::graph
