// Splits a backward graph in two: the gradients that another stage of a pipeline waits for, and the gradients
// of parameters, which nobody waits for.
//
//   const Graph backward = with_divided_convolutions(halves.backward);
//   const std::vector<std::size_t> deferred = choose_deferred(backward, roles);
//   const BackwardParts parts = split_backward_graph(backward, roles, deferred);
//   parts.inputs     // saved tensors, tangents, states -> as backward, without the deferred gradients;
//                    // before the states: what `weights` needs of it
//   parts.weights    // saved tensors, what `inputs` returned for it -> the deferred gradients
//
// Both together compute what backward computes, by the same operators: the gradients have the same bits.
//
// What is deferred. A node that only gradients of parameters need can wait. Operators that cost more than a
// pass over memory, such as products of matrices, wait if they lead to a parameter of two dims or more. Cheap
// ones, and those of parameters with at most one dim (norms, biases), wait unless it would take more memory
// between the two parts: a minimum cut over the memory that is kept, against the work that waits. Nodes that
// draw random numbers or have side effects, and what they need, never wait: they keep their order. Neither do
// nodes that read memory which backward writes in the end, which is before the second part. If no
// input has a gradient, as in the first stage of a pipeline, the operators wait that come last before a
// gradient, and not the chain from gradient to gradient that leads to them.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// Part of the keys of stored graphs: another number for each change of what is chosen.
inline constexpr int kBackwardSplitVersion = 2;

// What the inputs and outputs of a backward graph are. Inputs: saved tensors, tangents, states. Outputs:
// gradients, other results, states.
struct BackwardRoles {
  std::size_t saved = 0;     // inputs
  std::size_t tangents = 0;  // inputs after those
  std::size_t results = 0;   // outputs before the states
  // By gradient: the tensor whose gradient it is, or a part of it (a tensor inside a subclass). All gradients
  // of one tensor are computed in the same part.
  std::vector<std::size_t> tensor;
  std::vector<char> is_parameter, is_subclass;  // by tensor
  // By saved tensor: a parameter or buffer, whose memory is there anyway; nobody else reads its memory after
  // backward (Partition::donated); backward writes its memory (JointGraph::written_in_backward).
  std::vector<char> is_static, is_donated, is_written;
};

// One operator computes all gradients of a convolution. Replaces it by two, one for that of its input and one
// for those of weight and bias, so that the second can wait. The values stay the same.
Graph with_divided_convolutions(Graph backward);

// Returns the nodes that can wait, in order. Empty: none, or nothing that takes time.
std::vector<std::size_t> choose_deferred(const Graph& backward, const BackwardRoles& roles);

// Why these nodes cannot wait, for decoded graphs: "node 3 needs node 2, which is deferred". Empty if they
// can.
std::string why_not_deferred(const Graph& backward, const BackwardRoles& roles,
                             const std::vector<std::size_t>& deferred);

// One of the two.
struct BackwardPart {
  Graph graph;
  std::vector<std::size_t> saved;  // the saved tensors that it takes; they come first
  // What compilers are told (CompileRequest): inputs of the graph.
  std::vector<std::size_t> static_inputs, donated_inputs;
};

struct BackwardParts {
  // Takes tangents and states after the saved tensors. Returns all results, undefined ones for the deferred
  // gradients, then `kept` values, then states.
  BackwardPart inputs;
  // Takes the kept values after the saved tensors. Returns as many results, undefined but for the deferred
  // gradients.
  BackwardPart weights;
  std::size_t kept = 0;
  std::vector<char> is_deferred;  // by tensor
};

// `deferred` must be what choose_deferred() has returned, or be accepted by why_not_deferred().
BackwardParts split_backward_graph(const Graph& backward, const BackwardRoles& roles,
                                   const std::vector<std::size_t>& deferred);

}  // namespace penstock::graph
