// Shape inference for a single operator.
#pragma once

#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {

// Returns the results of `op` as fake tensors, for arguments that are values of `graph`.
Stack run_on_fake_arguments(const Graph& graph, const c10::OperatorHandle& op,
                            const std::vector<Operand>& arguments);

// Adds values to `graph` for the results of a node whose operator and arguments are set; views share memory
// with what they view.
std::vector<Operand> infer_results(Graph& graph, const Node& node);

}  // namespace penstock::graph
