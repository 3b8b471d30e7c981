// Forward and backward of a function in one graph. capture.h creates it and explains its inputs and outputs.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/metadata.h"
#include "penstock/graph/ir/subclass_record.h"

namespace penstock::graph {

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
  // The first output of the graph for one of meta.forward_returns().
  std::size_t first_output(std::size_t returned) const {
    return subclasses ? subclasses->forward_outputs[returned].first_flat() : returned;
  }
};

}  // namespace penstock::graph
