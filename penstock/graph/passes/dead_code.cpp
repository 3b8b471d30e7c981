// "dead-code": removes nodes whose results nobody uses. Draws of random numbers and side effects stay.
#include <utility>

#include "penstock/graph/passes/standard_passes.h"

namespace penstock::graph {
namespace {

class DeadCode final : public GraphPass {
 public:
  std::string_view name() const override { return "dead-code"; }
  // Also what a pass on a half has left unused.
  bool runs_on(PassRole) const override { return true; }
  bool takes_symbols() const override { return true; }
  Graph run(Graph graph, const PassContext&) const override {
    remove_dead_nodes(graph);
    return graph;
  }
};

}  // namespace

PassPointer dead_code_pass() { return std::make_shared<const DeadCode>(); }

}  // namespace penstock::graph
