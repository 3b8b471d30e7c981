// The compilers that exist besides the executor; rooms above this one make them.
// Private to graph/. Thread safety: any thread.
#pragma once

#include <memory>

#include "penstock/graph_compiler.h"

namespace penstock::graph {

// Generated kernels for groups of operators (graph/fused).
std::shared_ptr<const GraphCompiler> make_fused_compiler();

}  // namespace penstock::graph
