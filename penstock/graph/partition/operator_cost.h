// The cost model of graphs: what an operator costs, from the shapes of its tensors. For choices between
// saving and recomputing, which depend on ratios, not on seconds.
//
//   cost_of_node(graph, node)     // as many units as bytes could be moved to or from memory meanwhile
//
//   bytes that it reads and writes, each element once
//   + its arithmetic: products of matrices, convolutions and attention by their multiplications, others by
//     elements (exponentials and random numbers cost more than sums), in units that depend on the device and
//     the dtype: a processor multiplies about 8 times, a GPU 12 (float32) or 128 times (16 bits) while a byte
//     is moved
//   + the call itself: 4 KiB on the CPU, 64 KiB on a GPU
// Views cost nothing. Thread safety: any thread.
#pragma once

#include <cstdint>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// At least 1 for an operator that is no view, 0 for a view.
std::int64_t cost_of_node(const Graph& graph, const Node& node);

}  // namespace penstock::graph
