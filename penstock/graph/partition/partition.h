// Splits a joint graph without writes into forward and backward.
//
//   const Partition halves = partition_default(joint);
//   halves.forward: primals -> the joint graph's forward outputs, then the values saved for backward
//   halves.backward: saved values, tangents -> one gradient for each primal
// States (JointGraph::states) of forward come after the primals and after the forward outputs, those of
// backward after the tangents and after everything that backward returns.
//
// partition_default: forward computes what its results need, backward everything else; forward saves each
// value that backward uses. Nodes that draw random numbers or have side effects run in the phase in which
// they were recorded.
// partition_min_cut: backward recomputes cheap values (views, pointwise operators) where that reduces the
// saved bytes: a minimum cut between what backward needs and what must not be computed twice. The results are
// bitwise the same. Random operators with explicit states may be computed twice, from the same state.
// activation_plan.h: what is saved fits a budget, or follows rules for modules.
// What backward recomputes, it recomputes as late as possible.
#pragma once

#include <cstddef>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/trace/capture.h"

namespace penstock::graph {

struct Partition {
  Graph forward, backward;
  std::vector<ValueId> saved;  // values of the joint graph that are saved for backward
  // Nodes of backward that run later, as a graph of their own (backward_split.h). Empty: backward is one
  // graph.
  std::vector<std::size_t> deferred = {};
  std::size_t saved_bytes(const Graph& joint) const;
  // Indices into `saved` of tensors whose memory is shared with no input, result or gradient, so that
  // backward may overwrite it.
  std::vector<std::size_t> donated(const JointGraph& joint) const;
  // The saved tensors are the outputs of `forward` from this index to the end. Backward takes them first,
  // then the tangents.
  std::size_t first_saved_output() const { return forward.outputs.size() - saved.size(); }
};

// Throws ValueError for a graph with writes.
Partition partition_default(const JointGraph& joint);
Partition partition_min_cut(const JointGraph& joint);

namespace detail {

// Which parts of a joint graph belong to forward, before it is split.
struct ForwardBackwardSplit {
  std::vector<char> in_forward;    // by node: the forward results need it
  std::vector<char> from_forward;  // by value: a primal, or made by such a node
  std::vector<char> is_constant;   // by value
};
ForwardBackwardSplit forward_backward_split(const JointGraph& joint);

// Calls `visit(place)` for the outputs of the joint graph that backward returns.
template <class Visit>
void for_each_backward_output(const JointGraph& joint, Visit&& visit) {
  const std::size_t states = joint.first_state_output();
  for (std::size_t i = joint.forward_outputs; i < states; ++i) visit(i);
  for (std::size_t i = states + joint.states_of(Phase::Forward); i < joint.graph.outputs.size(); ++i)
    visit(i);
}

// The values of forward that backward uses if it recomputes none of forward's nodes.
std::vector<char> used_by_backward(const JointGraph& joint, const ForwardBackwardSplit& halves);

// Where the halves come from: nodes and values of the joint graph, by those of each half.
struct SplitOrigin {
  std::vector<std::size_t> forward_nodes, backward_nodes;
  std::vector<ValueId> forward_values, backward_values;
};

// Backward consists of what the gradients need, down to the values in `is_saved`. Nodes of forward among it
// run as late as possible.
Partition split(const JointGraph& joint, const ForwardBackwardSplit& halves,
                const std::vector<char>& is_saved, SplitOrigin* origin = nullptr);

}  // namespace detail

}  // namespace penstock::graph
