#include "penstock/graph/ir/joint_graph.h"

#include <fmt/format.h>

#include <algorithm>

namespace penstock::graph {

std::string StateChain::input_name() const {
  return fmt::format("{}{}[{}]", phase == Phase::Backward ? "backward_" : "",
                     kind == StateKind::Token ? "token" : "random_state", name);
}

std::size_t JointGraph::states_of(Phase phase) const {
  return static_cast<std::size_t>(std::count_if(
      states.begin(), states.end(), [&](const StateChain& state) { return state.phase == phase; }));
}

std::size_t JointGraph::states_of(Phase phase, StateKind kind) const {
  return static_cast<std::size_t>(std::count_if(states.begin(), states.end(), [&](const StateChain& state) {
    return state.phase == phase && state.kind == kind;
  }));
}

}  // namespace penstock::graph
