// The nodes of a graph as a tree that a reader can take in: equal stretches that follow each other are one part with a count, and what is
// between them is grouped by the modules whose parameters it uses.
//
//   for (const Fold& part : fold_graph(graph)) ...     // "embed", "blocks.0 ... blocks.3" x 4, "norm", ...
//
// Stretches are equal when their nodes, one by one, are the same operators with the same constants on tensors of the same geometry, and
// use each other's results in the same way; which parameters and results of other stretches they use may differ. Forward and backward are
// never in one part.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// Nodes [first, first + length * count) of a graph: `count` instances one after the other.
struct Fold {
  std::string name;                        // of a node: its operator; else the modules, or some operators
  Phase phase = Phase::Forward;
  std::size_t first = 0, length = 1, count = 1;
  std::vector<Fold> parts;                 // of the first instance, all of its nodes in order; none: one node

  bool is_node() const { return parts.empty(); }
  std::size_t end() const { return first + length * count; }
  std::size_t nodes() const { return length * count; }
};

struct FoldOptions {
  std::size_t most_parts = 32;   // of a part, and of the whole; more are put into parts of their own
  std::size_t most_of_phase = 7; // of the whole, in forward and in backward, if it has more than most_parts
  std::size_t least_saved = 4;   // nodes that counting instead of showing must save
};

// In the order of the nodes, all of which are in exactly one part. O(nodes * longest repeated stretch), the latter at most 2048.
std::vector<Fold> fold_graph(const Graph& graph, const FoldOptions& options = {});

// Whether two stretches of `length` nodes are equal in the sense above.
bool equal_stretches(const Graph& graph, std::size_t first, std::size_t second, std::size_t length);

}  // namespace penstock::graph
