// Compiles backward graphs when they run for the first time: a capture that is never differentiated saves the
// time.
//
//   const CompileLater later(graph_compiler("executor"));
//   auto backward = later.compile(graph, GraphRole::Backward);      // compiles nothing
//   backward->run(inputs);                                          // compiles, then runs
//
// Other graphs are compiled at once. Thread safety: that of a compiler; several threads may run a graph for
// the first time at once, and one of them compiles it.
#pragma once

#include <memory>

#include "penstock/graph/compiler/graph_compiler.h"

namespace penstock::graph {

class CompileLater final : public GraphCompiler {
 public:
  explicit CompileLater(std::shared_ptr<const GraphCompiler> compiler) : compiler_(std::move(compiler)) {}

  std::string_view name() const override { return compiler_->name(); }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph, GraphRole role) const override;

 private:
  std::shared_ptr<const GraphCompiler> compiler_;
};

}  // namespace penstock::graph
