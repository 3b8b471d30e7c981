#include "penstock/graph/wrap/graph_wrapper.h"

#include <utility>

namespace penstock::graph {

std::shared_ptr<const CompiledGraph> compile_wrapped(Graph graph, GraphRole role,
                                                     const GraphCompiler& compiler,
                                                     const GraphWrappers& wrappers) {
  for (const auto& wrapper : wrappers) wrapper->before_compile(graph, role);
  std::shared_ptr<const CompiledGraph> compiled = compiler.compile(graph, role);
  for (auto it = wrappers.rbegin(); it != wrappers.rend(); ++it)
    compiled = (*it)->around(std::move(compiled), role);
  return compiled;
}

}  // namespace penstock::graph
