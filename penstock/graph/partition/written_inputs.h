// Inputs that the forward graph writes itself, instead of returning their new values
// (AnalyzeOptions::keep_input_mutations).
#pragma once

#include "penstock/graph/ir/joint_graph.h"

namespace penstock::graph {

// Replaces the outputs with the new values of joint.written_in_graph by writes at the end of `forward`, the
// forward half of a split graph without writes. What else forward returns from the memory of these inputs,
// such as tensors saved for backward, becomes a copy that is made before the writes.
void write_inputs_in_graph(const JointGraph& joint, Graph& forward);

}  // namespace penstock::graph
