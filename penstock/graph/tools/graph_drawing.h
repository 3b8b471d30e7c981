// The boxes and arrows that the DOT and the SVG picture of a graph show.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/graph/tools/draw.h"

namespace penstock::graph {

struct GraphDrawing {
  GraphDrawing(const Graph& graph, const DrawOptions& options);

  enum class Kind : std::uint8_t { Input, Constant, Forward, Backward, Output };
  struct Box {
    Kind kind = Kind::Forward;
    std::string name, detail;  // "aten::mm", "float32[3, 2]"
    bool saved = false;
    std::size_t layer = 0;
  };
  struct Arrow {
    std::size_t from = 0, to = 0;
  };
  std::vector<Box> boxes;  // sorted: an arrow always leads to a later box
  std::vector<Arrow> arrows;
};

// An overview of a graph with too many nodes to show each.
std::string draw_folded_svg(const Graph& graph, const DrawOptions& options);

}  // namespace penstock::graph
