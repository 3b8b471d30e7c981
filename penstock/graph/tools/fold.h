// The nodes of a graph as a compact tree: equal consecutive sequences become one part with a count, and the
// nodes between them are grouped by the modules whose parameters they use.
//
//   for (const Fold& part : fold_graph(graph)) ...     // "embed", "blocks.0 ... blocks.3" x 4, "norm", ...
//
// Sequences are equal if their nodes, one by one, are the same operators with the same constants on tensors
// of the same geometry, and use each other's results in the same way; the parameters and the results of other
// sequences that they use may differ. A part never contains both forward and backward nodes.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// Nodes [first, first + length * count) of a graph: `count` consecutive instances.
struct Fold {
  // For a node, its operator; otherwise the modules, or some operators.
  std::string name;
  Phase phase = Phase::Forward;
  std::size_t first = 0, length = 1, count = 1;
  // Of the first instance, covering its nodes in order; empty for a single node.
  std::vector<Fold> parts;

  bool is_node() const { return parts.empty(); }
  std::size_t end() const { return first + length * count; }
  std::size_t nodes() const { return length * count; }
};

struct FoldOptions {
  std::size_t max_parts = 32;  // in one part, and at the top level; more are grouped into sub-parts
  // At the top level, in forward and in backward, if there are more than max_parts.
  std::size_t max_parts_per_phase = 7;
  std::size_t min_nodes_saved = 4;  // the fewest nodes that folding must save
};

// Returns the parts in the order of the nodes; each node is in exactly one part. O(nodes * longest repeated
// sequence), the latter at most 2048.
std::vector<Fold> fold_graph(const Graph& graph, const FoldOptions& options = {});

// Whether two sequences of `length` nodes are equal in the sense above.
bool equal_sequences(const Graph& graph, std::size_t first, std::size_t second, std::size_t length);

}  // namespace penstock::graph
