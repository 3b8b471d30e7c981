// What an operator would give, without running it.
#pragma once

#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/torch/dispatch/stack_tensors.h"

namespace penstock::graph {

// The results of `op` as fake tensors, for arguments that are values of `graph`.
Stack run_in_shape(const Graph& graph, const c10::OperatorHandle& op, const std::vector<Operand>& arguments);

// New values of `graph` for the results of a node that has its operator and arguments: views share memory with what they view.
std::vector<Operand> results_in_shape(Graph& graph, const Node& node);

}  // namespace penstock::graph
