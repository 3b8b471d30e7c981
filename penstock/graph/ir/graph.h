// What the library itself needs of graphs, besides the values of the public header.
//
//   const Geometry geometry = geometry_of(tensor);
//   to_text(geometry);                              // "float32[3, 4]"
#pragma once

#include <cstddef>
#include <string>

#include "penstock/graph.h"

namespace penstock::graph {

Geometry geometry_of(const at::Tensor& tensor);
bool has_geometry(const at::Tensor& tensor, const Geometry& geometry);
// Whether two elements share a place in memory (expand, unfold). Exact up to a million elements; above that
// it may return true for tensors without overlap.
bool overlaps_itself(const Geometry& geometry);

std::size_t count_writes(const Graph& graph);
// Whether the node starts a collective of this library or waits for one.
bool is_collective(const Node& node);

// "float32[3, 4]", with strides, offset and device if they are not the defaults; with a table "float32[B,
// 4]".
std::string to_text(const Geometry& geometry, const SymbolicTable* table = nullptr);
std::string to_text(const Operand& operand,
                    const SymbolicTable* table = nullptr);  // "%3", "[%3, none]", "0.5"

}  // namespace penstock::graph
