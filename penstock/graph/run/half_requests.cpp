#include "penstock/graph/run/half_requests.h"

#include <numeric>
#include <vector>

namespace penstock::graph {
namespace {

// The tensor among the inputs of the function that a primal belongs to.
std::size_t tensor_of_primal(const JointGraph& joint, std::size_t primal) {
  if (!joint.subclasses) return primal;
  const std::vector<FlattenRecord>& inputs = joint.subclasses->inputs;
  std::size_t tensor = 0;
  while (primal >= inputs[tensor].first_flat() + inputs[tensor].count()) ++tensor;
  return tensor;
}

}  // namespace

std::size_t static_primals(const FunctionCapture& capture) {
  const std::size_t found = capture.convention.found;
  if (found == 0 || !capture.joint.subclasses) return found;
  const FlattenRecord& last = capture.joint.subclasses->inputs[found - 1];
  return last.first_flat() + last.count();
}

CompileRequest forward_request(const PartitionedCapture& capture, GraphRole role) {
  CompileRequest request{.role = role};
  request.static_inputs.resize(static_primals(capture.capture));
  std::iota(request.static_inputs.begin(), request.static_inputs.end(), std::size_t{0});
  return request;
}

CompileRequest backward_request(const PartitionedCapture& capture) {
  const JointGraph& joint = capture.capture.joint;
  CompileRequest request{.role = GraphRole::Backward, .donated_inputs = capture.halves.donated(joint)};
  // Backward takes the saved tensors first. A parameter that forward writes is saved as a copy.
  const std::size_t found = static_primals(capture.capture);
  std::vector<char> is_static(joint.graph.values.size(), 0);  // by value
  for (std::size_t primal = 0; primal < found; ++primal)
    is_static[index_of(joint.graph.inputs[primal].value)] =
        !capture.capture.primal_written[tensor_of_primal(joint, primal)];
  for (const std::size_t primal : joint.written_in_graph)
    is_static[index_of(joint.graph.inputs[primal].value)] = 0;
  for (std::size_t i = 0; i < capture.halves.saved.size(); ++i)
    if (is_static[index_of(capture.halves.saved[i])]) request.static_inputs.push_back(i);
  return request;
}

}  // namespace penstock::graph
