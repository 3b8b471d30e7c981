// What both pictures of a graph show: boxes and the arrows between them.
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
  std::vector<Box> boxes;      // those that an arrow comes from stand before those it goes to
  std::vector<Arrow> arrows;
};

// The overview of a graph that has too many nodes to show each.
std::string draw_folded_svg(const Graph& graph, const DrawOptions& options);

}  // namespace penstock::graph
