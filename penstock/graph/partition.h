// Splits a joint graph without writes into forward and backward.
//
//   const Partition halves = partition_default(joint);
//   halves.forward: primals -> the joint graph's forward outputs, then the values saved for backward
//   halves.backward: saved values, tangents -> one gradient for each primal
//
// partition_default: what the forward results need is done in forward, everything else in backward; forward hands over each value
// that backward uses. Random numbers are drawn in forward.
#pragma once

#include <cstddef>
#include <vector>

#include "penstock/graph/capture.h"
#include "penstock/graph/graph.h"

namespace penstock::graph {

struct Partition {
  Graph forward, backward;
  std::vector<ValueId> saved;        // values of the joint graph that are handed over
  std::size_t saved_bytes(const Graph& joint) const;
};

// Throws ValueError for a graph with writes.
Partition partition_default(const JointGraph& joint);

}  // namespace penstock::graph
