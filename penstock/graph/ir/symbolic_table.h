// The parts of a graph that depend on symbols (sizes known only when it is called): expressions for
// geometries and constants, and their values for given sizes.
//
//   const SymbolicTable& table = *compiled.joint(0).graph.table;
//   table.symbols.names();                                   // {"B", "T"}
//   const Graph fixed = bind(compiled.joint(0).graph, {8, 128});   // for B = 8, T = 128, without symbols
//
// Entries are referenced by the SymbolicId of a Geometry or an Operand. Values inside a graph may have sizes
// without an expression ("?"); these are not needed to run it.
// Thread safety: that of a standard container.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "penstock/graph/ir/joint_graph.h"
#include "penstock/graph/ir/size_expression.h"

namespace penstock::graph {

struct SymbolicGeometry {
  std::vector<std::optional<SizeExpression>> sizes, strides;
  std::optional<SizeExpression> storage_offset;
  bool used_by_calls = false;  // to compare inputs, lay out gradients or make views of results
};

using NumberOrSize = std::variant<SizeExpression, NumberExpression>;

struct SymbolicConstant {
  c10::IValue example;                // a number, a number wrapped in a tensor, or a list of numbers
  std::vector<NumberOrSize> numbers;  // each number in it
};

// A tensor that the function found: a number in a 0-dim tensor, or a part of a larger tensor such as a table
// of positions.
struct SymbolicTensor {
  at::Tensor example;
  std::optional<NumberOrSize> number;
  SymbolicGeometry part;  // of the memory of the example, if it is not a number
};

// ---- numbers inside constants ----

using PlainNumber = std::variant<std::int64_t, double>;
// Returns std::nullopt for values that do not consist of numbers alone: strings, booleans, devices, tensors.
std::optional<std::vector<PlainNumber>> numbers_of(const c10::IValue& constant);
// A value like `example` with other numbers, of the same count and types.
c10::IValue with_numbers(const c10::IValue& example, const std::vector<PlainNumber>& numbers);
// The same for a 0-dim CPU tensor of double or 64-bit integer dtype.
std::optional<PlainNumber> number_of(const at::Tensor& tensor);

// ---- tables ----

// The whole table evaluated for one choice of sizes. Entries of geometries that calls do not use are empty.
struct BoundSizes final : c10::intrusive_ptr_target {
  SymbolValues values;  // of the symbols
  std::vector<c10::IValue> constants;
  std::vector<StridedLayout> layouts;
  std::vector<at::Tensor> tensors;
  bool checked = false;  // these sizes need no further check (DynamicCall)
};

class SymbolicTable {
 public:
  SymbolSet symbols;
  std::vector<SymbolicConstant> constants;
  std::vector<SymbolicGeometry> geometries;
  std::vector<SymbolicTensor> tensors;

  // Returns null if some expression has no value at these sizes, like T/2 for an odd T; `why` reports which
  // one.
  c10::intrusive_ptr<BoundSizes> at(const SymbolValues& values, std::string* why = nullptr) const;
  // "B = 8, T = 128".
  std::string text_of(const SymbolValues& values) const;
};

// Sizes, strides and offset of a geometry in a call. `bound` is null if nothing is symbolic.
struct LayoutInCall {
  at::IntArrayRef sizes, strides;
  std::int64_t storage_offset = 0;
};
inline LayoutInCall layout_in_call(const Geometry& geometry, const BoundSizes* bound) {
  if (geometry.symbolic == kNotSymbolic || !bound)
    return {geometry.sizes, geometry.strides, geometry.storage_offset};
  const StridedLayout& layout = bound->layouts[static_cast<std::size_t>(geometry.symbolic)];
  return {layout.sizes, layout.strides, layout.storage_offset};
}

// Replaces all symbols by the given sizes. Throws ValueError for a different number of symbols, or sizes that
// do not fit.
Graph bind(const Graph& graph, const SymbolValues& values);
JointGraph bind(const JointGraph& joint, const SymbolValues& values);
ViewAndMutationMeta bind(const ViewAndMutationMeta& meta, const SymbolicTable& table,
                         const SymbolValues& values);

// ---- text ----

struct LayoutText {
  std::string sizes, strides, storage_offset;  // "B, 4"
};
LayoutText layout_text(const Geometry& geometry, const SymbolicTable* table);
std::string constant_text(const SymbolicTable& table, SymbolicId constant);

}  // namespace penstock::graph
