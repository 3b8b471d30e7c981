// Side effects in their order by values: each operator with a side effect takes a token and returns it, so
// that none can be removed, and none of the same effect can change places.
//
//   make_effects_explicit(joint);                  // before the graph is split
//   token[ordered] is an input and an output of forward, backward_token[ordered] of backward
//
// A compiled forward takes its tokens before all other inputs, and returns them before all other outputs. A
// compiled backward takes its tokens after the gradients, and returns them last. The order is that of PyTorch
// 2.14. Tokens hold nothing; the wrapper passes and drops them, so a call neither takes nor returns any.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "penstock/graph/ir/joint_graph.h"
#include "penstock/graph/wrap/graph_wrapper.h"

namespace penstock::graph {

// Replaces the operators with side effects, in both phases. The graph must have no writes. Operators that
// read and set states of generators are no side effects: their order is that of random operators.
void make_effects_explicit(JointGraph& joint);

// Around the halves of such a graph.
class EffectTokens final : public GraphWrapper {
 public:
  explicit EffectTokens(const JointGraph& joint);

  std::string_view name() const override { return "effect tokens"; }
  std::string decision() const override { return decision_; }
  // Moves the tokens to their places.
  void before_compile(Graph& graph, CompileRequest& request) const override;
  std::shared_ptr<const CompiledGraph> around(std::shared_ptr<const CompiledGraph> inner,
                                              GraphRole role) const override;

 private:
  std::size_t forward_tokens_, backward_tokens_, backward_generators_;
  std::size_t primals_, forward_returns_;
  std::string decision_;
};

}  // namespace penstock::graph
