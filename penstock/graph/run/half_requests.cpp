#include "penstock/graph/run/half_requests.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "penstock/graph/ir/memory_groups.h"

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

// Which of the saved tensors are parameters and buffers. A parameter that forward writes is saved as a copy.
std::vector<std::size_t> static_saved(const FunctionCapture& capture, const Partition& halves) {
  const JointGraph& joint = capture.joint;
  const std::size_t found = static_primals(capture);
  std::vector<char> is_static(joint.graph.values.size(), 0);  // by value
  for (std::size_t primal = 0; primal < found; ++primal)
    is_static[index_of(joint.graph.inputs[primal].value)] =
        !capture.primal_written[tensor_of_primal(joint, primal)];
  for (const std::size_t primal : joint.written_in_graph)
    is_static[index_of(joint.graph.inputs[primal].value)] = 0;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < halves.saved.size(); ++i)
    if (is_static[index_of(halves.saved[i])]) places.push_back(i);
  return places;
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
  // Backward takes the saved tensors first.
  return {.role = GraphRole::Backward,
          .static_inputs = static_saved(capture.capture, capture.halves),
          .donated_inputs = capture.halves.donated(capture.capture.joint)};
}

BackwardRoles backward_roles(const FunctionCapture& capture, const Partition& halves) {
  const JointGraph& joint = capture.joint;
  BackwardRoles roles{.saved = halves.saved.size(),
                      .tangents = joint.tangents.size(),
                      .results = joint.backward_returns(),
                      .tensor = {},
                      .is_parameter = {},
                      .is_subclass = {},
                      .is_static = std::vector<char>(halves.saved.size(), 0),
                      .is_donated = std::vector<char>(halves.saved.size(), 0),
                      .is_written = std::vector<char>(halves.saved.size(), 0)};
  if (joint.subclasses) {
    const std::vector<FlattenRecord>& gradients = joint.subclasses->input_gradients;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      roles.tensor.insert(roles.tensor.end(), gradients[i].count(), i);
      roles.is_subclass.push_back(gradients[i].is_subclass());
    }
    roles.is_parameter.assign(gradients.size(), 0);
  } else {
    roles.tensor.resize(joint.primals);
    std::iota(roles.tensor.begin(), roles.tensor.end(), std::size_t{0});
    roles.is_parameter.assign(joint.primals, 0);
    roles.is_subclass.assign(joint.primals, 0);
  }
  std::fill_n(roles.is_parameter.begin(), std::min(capture.convention.found, roles.is_parameter.size()),
              char{1});
  for (const std::size_t i : static_saved(capture, halves)) roles.is_static[i] = 1;
  for (const std::size_t i : halves.donated(joint)) roles.is_donated[i] = 1;
  if (joint.written_in_backward.empty()) return roles;
  const MemoryGroups groups(joint.graph);
  for (const std::size_t primal : joint.written_in_backward)
    for (std::size_t i = 0; i < halves.saved.size(); ++i)
      roles.is_written[i] |= groups.of(halves.saved[i]) == groups.of(joint.graph.inputs[primal].value);
  return roles;
}

CompileRequest request_of(const BackwardPart& part) {
  return {.role = GraphRole::Backward,
          .static_inputs = part.static_inputs,
          .donated_inputs = part.donated_inputs};
}

}  // namespace penstock::graph
