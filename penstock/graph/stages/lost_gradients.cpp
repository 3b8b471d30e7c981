#include "penstock/graph/stages/lost_gradients.h"

#include <c10/core/ScalarType.h>

namespace penstock::graph {

std::optional<std::size_t> first_without_derivative(const ForwardTrace& trace, const CutStage& stage,
                                                    const std::vector<ValueId>& inputs) {
  if (inputs.empty()) return std::nullopt;
  const Graph& graph = trace.graph;
  std::vector<char> reached(static_cast<std::size_t>(graph.storages), 0);
  const auto reach = [&](ValueId value) {
    const at::ScalarType dtype = graph[value].geometry.dtype;
    if (at::isFloatingType(dtype) || at::isComplexType(dtype)) reached[index_of(graph[value].storage)] = 1;
  };
  for (const ValueId input : inputs) reach(input);
  for (std::size_t i = stage.first; i < stage.end; ++i) {
    const Node& node = graph.nodes[i];
    bool takes = false;
    // What required a gradient in the trace has derivatives.
    for_each_value(node.arguments, [&](ValueId value) {
      takes |= reached[index_of(graph[value].storage)] != 0 && trace.requires_grad[index_of(value)] == 0;
    });
    if (!takes) continue;
    if (!node.grad_enabled) return i;
    for_each_value(node.results, reach);
    for (const std::size_t argument : written_arguments(node))
      for (const ValueId value : node.arguments[argument].values)
        if (value != kNoValue) reach(value);
  }
  return std::nullopt;
}

}  // namespace penstock::graph
