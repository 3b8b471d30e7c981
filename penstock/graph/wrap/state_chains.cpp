#include "penstock/graph/wrap/state_chains.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace penstock::graph {

StateChains::Chain& StateChains::chain_of(Phase phase, const StateOfNode& state) {
  for (Chain& chain : chains_)
    if (chain.state.phase == phase && chain.state.name == state.name) return chain;
  const ValueId input = joint_.graph.new_value(
      kind_ == StateKind::Token ? geometry_of_token() : geometry_of_generator(state.device));
  chains_.push_back({{kind_, phase, state.name, state.device, state.generator}, input, input});
  return chains_.back();
}

void StateChains::pass_through(Node& node, const StateOfNode& state) {
  const c10::OperatorHandle op = operator_with_state(node.op, kind_);
  Chain& chain = chain_of(node.phase, state);
  node.op = op;
  node.arguments.push_back(Operand::of(chain.now));
  if (kind_ == StateKind::Generator) node.arguments.push_back(Operand::of(c10::IValue(state.device)));
  chain.now = joint_.graph.new_value(joint_.graph[chain.input].geometry);
  node.results.push_back(Operand::of(chain.now));
}

ValueId StateChains::now(Phase phase, const StateOfNode& state) { return chain_of(phase, state).now; }

void StateChains::set(Phase phase, const StateOfNode& state, ValueId value) {
  chain_of(phase, state).now = value;
}

void StateChains::add(const Chain& chain) {
  std::vector<StateChain>& states = joint_.states;
  // In the order of phases, and of kinds in each.
  const auto place = std::find_if(states.begin(), states.end(), [&](const StateChain& other) {
    return other.phase > chain.state.phase ||
           (other.phase == chain.state.phase && other.kind > chain.state.kind);
  });
  const std::ptrdiff_t which = place - states.begin();
  Graph& graph = joint_.graph;
  graph.inputs.insert(graph.inputs.begin() + static_cast<std::ptrdiff_t>(joint_.first_state_input()) + which,
                      Placeholder{chain.input, chain.state.input_name()});
  graph.outputs.insert(
      graph.outputs.begin() + static_cast<std::ptrdiff_t>(joint_.first_state_output()) + which,
      Operand::of(chain.now));
  states.insert(place, chain.state);
}

void StateChains::finish() {
  std::vector<char> used(joint_.graph.values.size(), 0);
  for (const Node& node : joint_.graph.nodes)
    for_each_value(node.arguments, [&](ValueId value) { used[index_of(value)] = 1; });
  for_each_value(joint_.graph.outputs, [&](ValueId value) { used[index_of(value)] = 1; });
  for (const Chain& chain : chains_)
    if (chain.now != chain.input || used[index_of(chain.input)]) add(chain);
  chains_.clear();
  verify(joint_.graph);
}

void note_states(const JointGraph& joint, ViewAndMutationMeta& meta) {
  meta.tokens.clear();
  meta.random_states.clear();
  for (const StateChain& state : joint.states)
    if (state.phase == Phase::Forward)
      (state.kind == StateKind::Token ? meta.tokens : meta.random_states).push_back(state.name);
  meta.backward_tokens = joint.states_of(Phase::Backward, StateKind::Token);
  meta.backward_random_states = joint.states_of(Phase::Backward, StateKind::Generator);
}

std::string states_text(const JointGraph& joint, StateKind kind) {
  std::string text;
  for (const StateChain& state : joint.states)
    if (state.kind == kind)
      text += (text.empty() ? "" : ", ") + state.name +
              (state.phase == Phase::Forward ? " in forward" : " in backward");
  return text;
}

}  // namespace penstock::graph
