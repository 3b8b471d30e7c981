// Random numbers as values: each random operator of a graph takes the state of its generator and returns the
// state afterwards, so that what a graph computes depends on its inputs alone.
//
//   make_random_states_explicit(joint);            // before the graph is split
//   random_state[cpu] is an input and an output of forward, backward_random_state[cpu] of backward
//
// Forward and backward have chains of their own, since other operators may draw between them. A part that
// backward computes again (recompute.h) begins with the state that forward had there, which is saved for
// backward like any other tensor; and a minimum cut may decide to draw again instead of saving what was
// drawn.
//
// A compiled forward takes the states after all other inputs, and returns them after its results and before
// what it saves; a compiled backward takes them last, and returns them after the gradients. The wrapper
// passes the states of the process's generators, and sets them to what the graph returns.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/ir/joint_graph.h"
#include "penstock/graph/wrap/graph_wrapper.h"

namespace penstock::graph {

// Replaces the operators that draw random numbers, in both phases. The graph must have no writes. Throws
// NotImplemented, naming it, for an operator that returns memory of its arguments.
void make_random_states_explicit(JointGraph& joint);

// Whether a node reads or sets the state of a generator (torch/random/generator_state.h).
bool accesses_generator(const Node& node);

// Removes nodes that read and set states of generators from a graph that draws no random numbers. Parts that
// are recomputed record them in case they draw.
void remove_idle_generator_accesses(Graph& graph);

// Around the halves of a graph with explicit states.
class RandomNumbers final : public GraphWrapper {
 public:
  // `kept`: what backward returns between its results and the states, for its second graph
  // (partition/backward_split.h).
  explicit RandomNumbers(const JointGraph& joint, std::size_t kept = 0);

  std::string_view name() const override { return "random numbers"; }
  std::string decision() const override { return decision_; }
  std::shared_ptr<const CompiledGraph> around(std::shared_ptr<const CompiledGraph> inner,
                                              GraphRole role) const override;

 private:
  struct Half {
    std::vector<StateChain> generators;
    std::size_t first_output = 0;
  };
  class WithStates;

  Half forward_, backward_;
  std::string decision_;
};

}  // namespace penstock::graph
