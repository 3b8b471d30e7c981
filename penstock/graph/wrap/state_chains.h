// Turns operators that depend on a state outside of the graph, and change it, into operators that take the
// state as an argument and return it: in each phase of a joint graph the operators of one state form a chain,
// from an input to an output of the graph.
//
//   StateChains chains(joint, StateKind::Token);
//   for (Node& node : joint.graph.nodes)
//     if (has_side_effect(node)) chains.pass_through(node, {effect_of(node)});
//   chains.finish();                       // adds the inputs and outputs
//
//   %7, %20 = penstock_effect::mine__send(%5, %19)
//   %9, %21 = penstock_effect::mine__send(%7, %20)
//
// The order of operators of one state then follows from the values of the graph. Used by random_numbers.h and
// effect_tokens.h; for states of your own, too.
#pragma once

#include <string>
#include <vector>

#include "penstock/graph/ir/joint_graph.h"

namespace penstock::graph {

// Which state an operator depends on.
struct StateOfNode {
  std::string name;
  at::Device device = at::kCPU;  // of a generator
  at::Generator generator = {};  // undefined: the default one of the device
};

class StateChains {
 public:
  // Both must live until finish().
  StateChains(JointGraph& joint, StateKind kind) : joint_(joint), kind_(kind) {}

  // The next operator of a state, in the order of the nodes of its phase. Throws NotImplemented for an
  // operator that cannot take a state (operator_with_state).
  void pass_through(Node& node, const StateOfNode& state);
  // The value of a state after the operators so far.
  ValueId now(Phase phase, const StateOfNode& state);
  // Gives it another value.
  void set(Phase phase, const StateOfNode& state, ValueId value);

  // Adds inputs and outputs for the states that were used, in the order in which they were, after those that
  // the graph has of the same kind and phase. A state that no operator reads and that keeps its value gets
  // none.
  void finish();

 private:
  struct Chain {
    StateChain state;
    ValueId input = kNoValue, now = kNoValue;
  };
  Chain& chain_of(Phase phase, const StateOfNode& state);
  void add(const Chain& chain);

  JointGraph& joint_;
  StateKind kind_;
  std::vector<Chain> chains_;
};

// Notes in the metadata of a function which states its joint graph has.
void note_states(const JointGraph& joint, ViewAndMutationMeta& meta);

// "ordered in forward, ordered in backward": the states of a kind, for messages.
std::string states_text(const JointGraph& joint, StateKind kind);

}  // namespace penstock::graph
