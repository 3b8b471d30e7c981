// Pictures of graphs: text for Graphviz, an SVG and a page for a browser, both without any other program.
//
//   write(out, to_dot(graph));                       // dot -Tpdf graph.dot; every node
//   write(picture, to_svg(graph, {.saved = partition.saved}));
//   write(page, to_html(graph, {.saved = partition.saved}));
//
// A small graph is drawn node by node, in layers, each node below what it needs; forward, backward, inputs and outputs have their colours,
// and what is saved for backward a thick border. A larger one is folded (fold.h) until it fits a screen of 1600 x 1000: equal blocks are one
// box with their number, forward on the left, backward on the right, and what is kept from the one for the other between them. In the page
// a click opens a box, down to single nodes; it is one file that loads nothing.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct DrawOptions {
  std::string title = "graph";
  std::vector<ValueId> saved;     // values that forward hands to backward
  std::size_t most_boxes = 24;    // of an SVG that shows every node; a graph with more boxes is folded
};

std::string to_dot(const Graph& graph, const DrawOptions& options = {});
std::string to_svg(const Graph& graph, const DrawOptions& options = {});
std::string to_html(const Graph& graph, const DrawOptions& options = {});

}  // namespace penstock::graph
