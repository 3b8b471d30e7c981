// "common-subexpressions": merges nodes that compute the same from the same (ir/rewrite.h).
//
// Only within one phase: what backward computes a second time it computes to save memory. Not what draws
// random numbers or has side effects, and not what is in the memory of an output.
#include <utility>

#include "penstock/graph/ir/rewrite.h"
#include "penstock/graph/passes/standard_passes.h"

namespace penstock::graph {
namespace {

class CommonSubexpressions final : public GraphPass {
 public:
  std::string_view name() const override { return "common-subexpressions"; }
  bool takes_symbols() const override { return true; }
  Graph run(Graph graph, const PassContext&) const override {
    merge_common_subexpressions(graph);
    return graph;
  }
};

}  // namespace

PassPointer common_subexpressions_pass() { return std::make_shared<const CommonSubexpressions>(); }

}  // namespace penstock::graph
