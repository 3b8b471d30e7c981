// Pictures of graphs: text for Graphviz, and an SVG without any other program.
//
//   write(out, to_dot(graph));                       // dot -Tpdf graph.dot
//   write(page, to_svg(graph, {.saved = partition.saved}));
//
// Nodes stand in layers, each below what it needs; forward, backward, inputs and outputs have their colours, and what is saved for
// backward a thick border.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/graph.h"

namespace penstock::graph {

struct DrawOptions {
  std::string title = "graph";
  std::vector<ValueId> saved;     // values that forward hands to backward
  std::size_t most_nodes = 3000;  // of an SVG; a larger graph is a ValueError
};

std::string to_dot(const Graph& graph, const DrawOptions& options = {});
std::string to_svg(const Graph& graph, const DrawOptions& options = {});

}  // namespace penstock::graph
