#include "penstock/graph/run/step_memory.h"

#include <algorithm>
#include <map>
#include <set>

#include "penstock/graph/ir/memory_groups.h"

namespace penstock::graph {
namespace {

// What exists before backward runs: memory that forward has made and saved, and gradients of results.
std::vector<RunMemoryOptions::Counted> counted_in_backward(const JointGraph& joint, const Partition& halves,
                                                           const MemoryGroups& groups) {
  std::vector<RunMemoryOptions::Counted> counted;
  for (std::size_t i = 0; i < halves.saved.size(); ++i)
    if (const std::size_t group = groups.of(halves.saved[i]); !groups.is_given(group))
      counted.push_back({.input = i, .memory = group, .bytes = groups.bytes(group)});
  for (std::size_t i = joint.primals; i < joint.first_state_input(); ++i) {
    const std::size_t group = groups.of(joint.graph.inputs[i].value);
    counted.push_back(
        {.input = halves.saved.size() + i - joint.primals, .memory = group, .bytes = groups.bytes(group)});
  }
  return counted;
}

}  // namespace

StepMemory memory_of_step(const JointGraph& joint, const ActivationPlan& plan) {
  const MemoryGroups groups(joint.graph);
  std::set<std::size_t> saved;
  for (const ValueId value : plan.halves.saved)
    if (!groups.is_given(groups.of(value))) saved.insert(groups.of(value));
  StepMemory step;
  step.forward_operators = plan.origin.forward_nodes.size();
  step.nodes = plan.origin.forward_nodes;
  step.nodes.insert(step.nodes.end(), plan.origin.backward_nodes.begin(), plan.origin.backward_nodes.end());
  const std::set<std::size_t> of_forward(plan.origin.forward_nodes.begin(), plan.origin.forward_nodes.end());

  const RunMemory forward = memory_of_run(plan.halves.forward);
  step.live = forward.live;
  std::map<std::size_t, std::size_t> place;  // of saved memory in step.tensors, by group
  for (const LiveMemory& each : forward.tensors) {
    const ValueId value = plan.origin.forward_values[index_of(each.value)];
    StepTensor tensor{.value = value, .bytes = each.bytes, .first = each.first, .last = each.last};
    if (const std::size_t group = groups.of(value); each.is_result && saved.contains(group)) {
      tensor.kind = StepTensor::Kind::Saved;
      tensor.bytes = groups.bytes(group);
      place.emplace(group, step.tensors.size());
    }
    step.tensors.push_back(tensor);
  }

  const RunMemory backward = memory_of_run(
      plan.halves.backward, {.donated_inputs = plan.halves.donated(joint),
                             .counted_inputs = counted_in_backward(joint, plan.halves, groups)});
  step.live.insert(step.live.end(), backward.live.begin(), backward.live.end());
  for (const LiveMemory& each : backward.tensors) {
    const ValueId value = plan.origin.backward_values[index_of(each.value)];
    const std::size_t last = step.forward_operators + each.last;
    if (const auto known = each.is_input ? place.find(groups.of(value)) : place.end(); known != place.end()) {
      step.tensors[known->second].last = last;
      continue;
    }
    StepTensor tensor{
        .value = value, .bytes = each.bytes, .first = step.forward_operators + each.first, .last = last};
    tensor.kind = each.is_input                                                 ? StepTensor::Kind::Given
                  : each.is_result                                              ? StepTensor::Kind::Gradient
                  : of_forward.contains(plan.origin.backward_nodes[each.first]) ? StepTensor::Kind::Recomputed
                                                                                : StepTensor::Kind::Temporary;
    step.tensors.push_back(tensor);
  }
  return step;
}

std::size_t StepMemory::peak_operator() const {
  return static_cast<std::size_t>(std::max_element(live.begin(), live.end()) - live.begin());
}

std::int64_t StepMemory::peak_bytes() const { return live.empty() ? 0 : live[peak_operator()]; }

}  // namespace penstock::graph
