#include "penstock/graph/partition/partition.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/partition/part_of_graph.h"

namespace penstock::graph {
namespace {

// The nodes of backward in the order in which they run: those that are recomputed as late as possible, just
// before the first node that uses their results, so that these results live as briefly as the order of the
// others allows.
class BackwardOrder {
 public:
  // `chosen`: by node, whether backward runs it. `at_hand`: by value, whether it is an input of backward.
  BackwardOrder(const Graph& graph, const std::vector<char>& chosen, const std::vector<char>& recomputed,
                const std::vector<char>& at_hand)
      : graph_(graph), waiting_(graph.nodes.size(), 0), maker_(graph.values.size(), kNone) {
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
      waiting_[i] = chosen[i] && recomputed[i];
      if (waiting_[i])
        for_each_value(graph.nodes[i].results, [&](ValueId value) {
          if (!at_hand[index_of(value)]) maker_[index_of(value)] = i;
        });
    }
    for (std::size_t i = 0; i < graph.nodes.size(); ++i)
      if (chosen[i] && !recomputed[i]) {
        add_makers_of(i);
        order_.push_back(i);
      }
    // What backward only returns.
    for (std::size_t i = 0; i < graph.nodes.size(); ++i)
      if (waiting_[i]) add(i);
  }

  const std::vector<std::size_t>& order() const { return order_; }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  void add(std::size_t node) {
    if (!waiting_[node]) return;
    waiting_[node] = 0;
    add_makers_of(node);
    order_.push_back(node);
  }

  // Adds what makes the arguments of a node. Without recursion: chains may be as long as the model is deep.
  void add_makers_of(std::size_t node) {
    struct Open {
      std::size_t node;
      std::vector<std::size_t> makers;  // still to be added, the next one last
    };
    std::vector<Open> open{{node, makers_of(node)}};
    while (!open.empty()) {
      if (open.back().makers.empty()) {
        if (open.size() > 1) order_.push_back(open.back().node);
        open.pop_back();
        continue;
      }
      const std::size_t maker = open.back().makers.back();
      open.back().makers.pop_back();
      if (!waiting_[maker]) continue;
      waiting_[maker] = 0;
      open.push_back({maker, makers_of(maker)});
    }
  }

  std::vector<std::size_t> makers_of(std::size_t node) const {
    std::vector<std::size_t> makers;
    for_each_value(graph_.nodes[node].arguments, [&](ValueId value) {
      if (maker_[index_of(value)] != kNone) makers.push_back(maker_[index_of(value)]);
    });
    std::reverse(makers.begin(), makers.end());
    return makers;
  }

  const Graph& graph_;
  std::vector<char> waiting_;       // by node: recomputed, and not in the order yet
  std::vector<std::size_t> maker_;  // by value: the recomputed node that makes it
  std::vector<std::size_t> order_;
};

}  // namespace

std::size_t Partition::saved_bytes(const Graph& joint) const {
  std::size_t bytes = 0;
  for (const ValueId value : saved)
    bytes += static_cast<std::size_t>(joint[value].geometry.numel()) *
             c10::elementSize(joint[value].geometry.dtype);
  return bytes;
}

std::vector<std::size_t> Partition::donated(const JointGraph& joint) const {
  const Graph& graph = joint.graph;
  std::vector<char> held(static_cast<std::size_t>(graph.storages), 0);
  const auto hold = [&](ValueId value) { held[index_of(graph[value].storage)] = 1; };
  for (const Placeholder& input : graph.inputs) hold(input.value);
  for (const ConstantTensor& constant : graph.constants) hold(constant.value);
  for_each_value(graph.outputs, hold);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < saved.size(); ++i)
    if (!held[index_of(graph[saved[i]].storage)]) places.push_back(i);
  return places;
}

namespace detail {

ForwardBackwardSplit forward_backward_split(const JointGraph& joint) {
  const Graph& graph = joint.graph;
  if (const std::size_t writing = count_writes(graph); writing > 0)
    throw ValueError(fmt::format(
        "graph: {} nodes write memory, expected none; functionalize the graph before splitting it", writing));
  ForwardBackwardSplit halves{std::vector<char>(graph.nodes.size(), 0),
                              std::vector<char>(graph.values.size(), 0),
                              std::vector<char>(graph.values.size(), 0)};
  std::vector<char> needed(graph.values.size(), 0);
  const auto need = [&](std::size_t output) {
    for (const ValueId value : graph.outputs[output].values)
      if (value != kNoValue) needed[index_of(value)] = 1;
  };
  for (std::size_t i = 0; i < joint.forward_outputs; ++i) need(i);
  for (std::size_t i = 0; i < joint.states_of(Phase::Forward); ++i) need(joint.first_state_output() + i);
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    const Node& node = graph.nodes[i];
    bool needs = must_run(node) && node.phase == Phase::Forward;
    for_each_value(node.results, [&](ValueId value) { needs |= needed[index_of(value)] != 0; });
    if (!needs) continue;
    halves.in_forward[i] = 1;
    for_each_value(node.results, [&](ValueId value) { halves.from_forward[index_of(value)] = 1; });
    for_each_value(node.arguments, [&](ValueId value) { needed[index_of(value)] = 1; });
  }
  const auto is_of_forward = [&](std::size_t input) {
    halves.from_forward[index_of(graph.inputs[input].value)] = 1;
  };
  for (std::size_t i = 0; i < joint.primals; ++i) is_of_forward(i);
  for (std::size_t i = 0; i < joint.states_of(Phase::Forward); ++i)
    is_of_forward(joint.first_state_input() + i);
  for (const ConstantTensor& constant : graph.constants) halves.is_constant[index_of(constant.value)] = 1;
  return halves;
}

std::vector<char> used_by_backward(const JointGraph& joint, const ForwardBackwardSplit& halves) {
  const Graph& graph = joint.graph;
  std::vector<char> wanted(graph.values.size(), 0);
  for_each_backward_output(joint, [&](std::size_t output) {
    for (const ValueId value : graph.outputs[output].values)
      if (value != kNoValue) wanted[index_of(value)] = 1;
  });
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    if (halves.in_forward[i]) continue;
    bool needs = must_run(graph.nodes[i]);
    for_each_value(graph.nodes[i].results, [&](ValueId value) { needs |= wanted[index_of(value)] != 0; });
    if (needs) for_each_value(graph.nodes[i].arguments, [&](ValueId value) { wanted[index_of(value)] = 1; });
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = wanted[i] && halves.from_forward[i];
  return wanted;
}

Partition split(const JointGraph& joint, const ForwardBackwardSplit& halves,
                const std::vector<char>& is_saved, SplitOrigin* origin) {
  const Graph& graph = joint.graph;
  std::vector<char> wanted(graph.values.size(), 0), in_backward(graph.nodes.size(), 0);
  for_each_backward_output(joint, [&](std::size_t output) {
    for (const ValueId value : graph.outputs[output].values)
      if (value != kNoValue) wanted[index_of(value)] = 1;
  });
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    bool needs = must_run(graph.nodes[i]) && !halves.in_forward[i];
    for_each_value(graph.nodes[i].results,
                   [&](ValueId value) { needs |= wanted[index_of(value)] && !is_saved[index_of(value)]; });
    if (!needs) continue;
    in_backward[i] = 1;
    for_each_value(graph.nodes[i].arguments, [&](ValueId value) { wanted[index_of(value)] = 1; });
  }

  Partition result;
  for (std::size_t i = 0; i < graph.values.size(); ++i)
    if (is_saved[i] && wanted[i]) result.saved.push_back(ValueId{static_cast<std::int32_t>(i)});
  const std::size_t states = joint.first_state_input(),
                    backward_states = states + joint.states_of(Phase::Forward);
  const auto count = [](const std::vector<char>& chosen) {
    return static_cast<std::size_t>(std::count(chosen.begin(), chosen.end(), char{1}));
  };
  PartOfGraph forward(graph, count(halves.in_forward)), backward(graph, count(in_backward));
  const auto add_inputs = [&](PartOfGraph& part, std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) part.add_input(graph.inputs[i].value, graph.inputs[i].name);
  };
  add_inputs(forward, 0, joint.primals);
  add_inputs(forward, states, backward_states);
  for (const ValueId value : result.saved)
    backward.add_input(value, fmt::format("saved_{}", index_of(value)));
  add_inputs(backward, joint.primals, states);
  add_inputs(backward, backward_states, graph.inputs.size());
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    if (halves.in_forward[i]) forward.add_node(graph.nodes[i]);
  const BackwardOrder order(graph, in_backward, halves.in_forward, is_saved);
  for (const std::size_t i : order.order()) backward.add_node(graph.nodes[i], is_saved);
  for (std::size_t i = 0; i < joint.forward_outputs; ++i) forward.add_output(graph.outputs[i]);
  for (std::size_t i = 0; i < joint.states_of(Phase::Forward); ++i)
    forward.add_output(graph.outputs[joint.first_state_output() + i]);
  for (const ValueId value : result.saved) forward.add_output(Operand::of(value));
  for_each_backward_output(joint, [&](std::size_t output) { backward.add_output(graph.outputs[output]); });
  if (origin) {
    for (std::size_t i = 0; i < graph.nodes.size(); ++i)
      if (halves.in_forward[i]) origin->forward_nodes.push_back(i);
    origin->backward_nodes = order.order();
    origin->forward_values = forward.take_old_ids();
    origin->backward_values = backward.take_old_ids();
  }
  result.forward = forward.finish();
  result.backward = backward.finish();
  return result;
}

}  // namespace detail

Partition partition_default(const JointGraph& joint) {
  const detail::ForwardBackwardSplit halves = detail::forward_backward_split(joint);
  return detail::split(joint, halves, detail::used_by_backward(joint, halves));
}

}  // namespace penstock::graph
