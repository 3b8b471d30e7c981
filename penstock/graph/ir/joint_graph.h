// Forward and backward of a function in one graph. capture.h creates it and explains its inputs and outputs.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/metadata.h"
#include "penstock/graph/ir/state_operator.h"
#include "penstock/graph/ir/subclass_record.h"

namespace penstock::graph {

// A state outside of the graph that one of its phases takes as an input and returns as an output: that of a
// random generator, or the token that orders side effects (wrap/state_chains.h).
struct StateChain {
  StateKind kind = StateKind::Token;
  Phase phase = Phase::Forward;
  std::string name;              // of the effect: "ordered"; of the generator: "cpu", "cuda:0"
  at::Device device = at::kCPU;  // of a generator
  at::Generator generator = {};  // that the function has passed to operators; undefined: the default one

  // As an input of the graph: "token[ordered]", "backward_random_state[cpu]".
  std::string input_name() const;
};

struct JointGraph {
  Graph graph;
  std::size_t primals = 0;          // inputs of the graph that are inputs of the function
  std::size_t forward_outputs = 0;  // outputs before the gradients
  // meta.tangents without those of results that are the same tensor as an earlier one.
  std::vector<TangentInfo> tangents;
  // Primals; their new values are the last outputs, in this order.
  std::vector<std::size_t> written_in_backward = {};
  // Primals that the forward graph writes itself; their new values are the last of the forward outputs. Once
  // the graph is split, forward writes them instead of returning them (write_inputs_in_graph).
  std::vector<std::size_t> written_in_graph = {};
  // The forward outputs before those.
  std::size_t forward_returns() const { return forward_outputs - written_in_graph.size(); }

  // Set if a tensor of the function is a subclass; `primals`, `forward_outputs`, `tangents` and the gradients
  // then count the plain tensors inside.
  std::shared_ptr<const SubclassLayout> subclasses;
  // The last inputs and the last outputs of the graph are states: tokens of forward, generators of forward,
  // tokens of backward, generators of backward.
  std::vector<StateChain> states = {};
  std::size_t states_of(Phase phase) const;
  std::size_t states_of(Phase phase, StateKind kind) const;
  // The first of them: `primals` and tangents come before.
  std::size_t first_state_input() const { return graph.inputs.size() - states.size(); }
  // Gradients and inputs that backward writes come before.
  std::size_t first_state_output() const { return graph.outputs.size() - states.size(); }
  // The outputs of backward that are not states.
  std::size_t backward_returns() const { return first_state_output() - forward_outputs; }

  // The first output of the graph for one of meta.forward_returns().
  std::size_t first_output(std::size_t returned) const {
    return subclasses ? subclasses->forward_outputs[returned].first_flat() : returned;
  }
};

}  // namespace penstock::graph
