#include "penstock/graph/wrap/graph_wrapper.h"

#include <utility>

namespace penstock::graph {

std::shared_ptr<const CompiledGraph> compile_wrapped(const Graph& graph, CompileRequest request,
                                                     const GraphCompiler& compiler,
                                                     const GraphWrappers& wrappers) {
  if (wrappers.empty()) return compiler.compile(graph, request);
  Graph changed = graph;
  for (const auto& wrapper : wrappers) wrapper->before_compile(changed, request);
  std::shared_ptr<const CompiledGraph> compiled = compiler.compile(changed, request);
  for (auto it = wrappers.rbegin(); it != wrappers.rend(); ++it)
    compiled = (*it)->around(std::move(compiled), request.role);
  return compiled;
}

}  // namespace penstock::graph
