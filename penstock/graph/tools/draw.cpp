#include "penstock/graph/tools/draw.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "penstock/graph/tools/graph_drawing.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kNoBox = static_cast<std::size_t>(-1);

std::string_view dot_colour(GraphDrawing::Kind kind) {
  switch (kind) {
    case GraphDrawing::Kind::Input:
      return "#cfe8cf";
    case GraphDrawing::Kind::Constant:
      return "#e4e4e4";
    case GraphDrawing::Kind::Forward:
      return "#cfe0f5";
    case GraphDrawing::Kind::Backward:
      return "#f7d9c4";
    case GraphDrawing::Kind::Output:
      return "#f4efc2";
  }
  return "#ffffff";
}

std::string dot_text(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '"' || c == '\\') escaped += '\\';
    escaped += c == '\n' ? ' ' : c;
  }
  return escaped;
}

}  // namespace

GraphDrawing::GraphDrawing(const Graph& graph, const DrawOptions& options) {
  std::vector<std::size_t> box_of(graph.values.size(), kNoBox);
  std::vector<char> is_saved(graph.values.size(), 0);
  for (const ValueId value : options.saved) is_saved[index_of(value)] = 1;
  const auto add = [&](Box box) {
    boxes.push_back(std::move(box));
    return boxes.size() - 1;
  };
  const auto connect = [&](ValueId value, std::size_t to) {
    const std::size_t from = box_of[index_of(value)];
    if (from == kNoBox) return;
    boxes[to].layer = std::max(boxes[to].layer, boxes[from].layer + 1);
    const auto same = [&](const Arrow& arrow) { return arrow.from == from && arrow.to == to; };
    if (std::none_of(arrows.rbegin(),
                     arrows.rbegin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(arrows.size(), 16)),
                     same))
      arrows.push_back({from, to});
  };
  for (const Placeholder& input : graph.inputs)
    box_of[index_of(input.value)] =
        add({Kind::Input, input.name, to_text(graph[input.value].geometry, graph.table.get()),
             is_saved[index_of(input.value)] != 0, 0});
  for (const ConstantTensor& constant : graph.constants)
    box_of[index_of(constant.value)] = add(
        {Kind::Constant, "constant", to_text(graph[constant.value].geometry, graph.table.get()), false, 0});
  for (const Node& node : graph.nodes) {
    Box box{node.phase == Phase::Forward ? Kind::Forward : Kind::Backward,
            c10::toString(node.op.operator_name()), "", false, 0};
    for_each_value(node.results, [&](ValueId value) {
      box.detail += (box.detail.empty() ? "" : ", ") + to_text(graph[value].geometry, graph.table.get());
      box.saved |= is_saved[index_of(value)] != 0;
    });
    const std::size_t place = add(std::move(box));
    for_each_value(node.arguments, [&](ValueId value) { connect(value, place); });
    for_each_value(node.results, [&](ValueId value) { box_of[index_of(value)] = place; });
  }
  for (std::size_t i = 0; i < graph.outputs.size(); ++i) {
    const ValueId value = graph.outputs[i].value();
    if (value == kNoValue) continue;
    connect(value, add({Kind::Output, fmt::format("output {}", i),
                        to_text(graph[value].geometry, graph.table.get()), false, 0}));
  }
}

std::string to_dot(const Graph& graph, const DrawOptions& options) {
  const GraphDrawing drawing(graph, options);
  std::string text = fmt::format(
      "digraph \"{}\" {{\n  rankdir=TB;\n  node [shape=box, style=\"filled,rounded\", "
      "fontname=\"Helvetica\", fontsize=10];\n",
      dot_text(options.title));
  for (std::size_t i = 0; i < drawing.boxes.size(); ++i) {
    const GraphDrawing::Box& box = drawing.boxes[i];
    fmt::format_to(std::back_inserter(text), "  n{} [label=\"{}\\n{}\", fillcolor=\"{}\"{}];\n", i,
                   dot_text(box.name), dot_text(box.detail), dot_colour(box.kind),
                   box.saved ? ", penwidth=3" : "");
  }
  for (const GraphDrawing::Arrow& arrow : drawing.arrows)
    fmt::format_to(std::back_inserter(text), "  n{} -> n{};\n", arrow.from, arrow.to);
  return text + "}\n";
}

}  // namespace penstock::graph
