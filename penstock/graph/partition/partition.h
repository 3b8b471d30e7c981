// Splits a joint graph without writes into forward and backward.
//
//   const Partition halves = partition_default(joint);
//   halves.forward: primals -> the joint graph's forward outputs, then the values saved for backward
//   halves.backward: saved values, tangents -> one gradient for each primal
//
// partition_default: what the forward results need is done in forward, everything else in backward; forward hands over each value
// that backward uses. What draws random numbers or has side effects runs in the half that it was recorded in.
// partition_min_cut: backward computes cheap values (views, pointwise operators) once more where that makes what is handed over
// smaller: a minimum cut between what backward needs and what must not be computed twice, by bytes. The bits are the same.
#pragma once

#include <cstddef>
#include <vector>

#include "penstock/graph/trace/capture.h"
#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct Partition {
  Graph forward, backward;
  std::vector<ValueId> saved;        // values of the joint graph that are handed over
  std::size_t saved_bytes(const Graph& joint) const;
  // Places among `saved` whose memory nobody else holds, neither an input nor a result nor a gradient: backward may write over it.
  std::vector<std::size_t> donated(const JointGraph& joint) const;
  // Where the saved tensors stand among the outputs of `forward`: from here to the end. Backward takes them first, then the tangents.
  std::size_t first_saved_output() const { return forward.outputs.size() - saved.size(); }
};

// Throws ValueError for a graph with writes.
Partition partition_default(const JointGraph& joint);
Partition partition_min_cut(const JointGraph& joint);

namespace detail {

// What is known of a joint graph before it is split.
struct ForwardBackwardSplit {
  std::vector<char> in_forward;     // by node: the forward results need it
  std::vector<char> from_forward;   // by value: a primal, or made by such a node
  std::vector<char> is_constant;    // by value
};
ForwardBackwardSplit halves_of(const JointGraph& joint);

// The values of forward that backward uses, when it computes none of forward's nodes again.
std::vector<char> used_by_backward(const JointGraph& joint, const ForwardBackwardSplit& halves);

// Backward is what the gradients need, down to the values in `is_saved`.
Partition split(const JointGraph& joint, const ForwardBackwardSplit& halves, const std::vector<char>& is_saved);

}  // namespace detail

}  // namespace penstock::graph
