// Removes the writes from a graph: afterwards no node writes memory that another node can see.
//
//   Graph pure = functionalize(joint.graph);
//   count_writes(pure);                        // 0
//
// `y = x + 1; y[0].mul_(2); return y` becomes
// `y = x + 1; v = y[0]; w = v * 2; y' = as_strided_scatter(y, w, ...); return y'`.
// An in-place or out= operator becomes its functional counterpart. Its result goes into a new version of the
// memory, and values of that memory are taken from the new version at their next use. The results are bit for
// bit those of the graph with writes.
//
// Memory that is accessed as several dtypes (view with a dtype, view_as_real, conj) is represented as a row
// of integers once it is written; values of any dtype are taken from that row.
// Inputs are no longer written: an output that was a written input becomes its new value. The first
// `forward_outputs` outputs have their values before the first node of backward, the others those at the end.
// Writing a constant is a StateError, because the write would have no visible effect. An operator without a
// functional counterpart, or one that gives a tensor other memory (set_, resize_), throws NotImplemented and
// names it.
// Batch norm in training writes its running statistics although its schema does not say so; it becomes
// penstock::native_batch_norm_functional, which returns the new statistics (on a GPU
// cudnn_batch_norm_functional).
#pragma once

#include <cstddef>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

Graph functionalize(const Graph& graph, std::size_t forward_outputs = 0);
// Returns a graph without writes unchanged.
Graph functionalize(Graph&& graph, std::size_t forward_outputs = 0);

// The operator that computes what `op` writes: the same name without the underscore, or the overload without
// `out`, with the same other arguments. Returns nullopt if there is no such operator.
c10::optional<c10::OperatorHandle> functional_counterpart(const c10::OperatorHandle& op);

}  // namespace penstock::graph
