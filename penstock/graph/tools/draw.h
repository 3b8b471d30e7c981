// Pictures of graphs: text for Graphviz, an SVG and an HTML page. SVG and page need no other program.
//
//   write(out, to_dot(graph));                       // dot -Tpdf graph.dot; every node
//   write(picture, to_svg(graph, {.saved = partition.saved}));
//   write(page, to_html(graph, {.saved = partition.saved}));
//
// A small graph is drawn node by node, in layers, each node below its operands; forward, backward, inputs and
// outputs have different colours, and values saved for backward a thick border. A larger graph is folded
// (fold.h) until it fits a screen of 1600 x 1000: equal blocks become one box with a count, forward on the
// left, backward on the right, and saved tensors between them. In the page a click opens a box, down to
// single nodes; the page is a single file that loads nothing.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct DrawOptions {
  std::string title = "graph";
  std::vector<ValueId> saved;  // values that forward saves for backward
  std::size_t max_boxes = 24;  // for an SVG that shows every node; a graph with more boxes is folded
};

std::string to_dot(const Graph& graph, const DrawOptions& options = {});
std::string to_svg(const Graph& graph, const DrawOptions& options = {});
std::string to_html(const Graph& graph, const DrawOptions& options = {});

}  // namespace penstock::graph
