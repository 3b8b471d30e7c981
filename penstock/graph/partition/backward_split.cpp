#include "penstock/graph/partition/backward_split.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "penstock/graph/ir/memory_groups.h"
#include "penstock/graph/partition/cheap_operators.h"
#include "penstock/graph/partition/operator_cost.h"
#include "penstock/graph/partition/part_of_graph.h"
#include "penstock/graph/saving/max_flow.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kNoSuchNode = static_cast<std::size_t>(-1);

// Bytes of memory for a unit of work: a node is computed early only if that frees at least so much of what it
// would move.
constexpr double kBytesForWork = 1.0 / 64;

// By node: whether it reads memory that backward writes.
std::vector<char> readers_of_written(const Graph& graph, const BackwardRoles& roles) {
  std::vector<char> reads(graph.nodes.size(), 0);
  if (std::find(roles.is_written.begin(), roles.is_written.end(), 1) == roles.is_written.end()) return reads;
  const MemoryGroups groups(graph);
  std::vector<char> is_written(groups.count(), 0);
  for (std::size_t i = 0; i < roles.saved; ++i)
    if (roles.is_written[i]) is_written[groups.of(graph.inputs[i].value)] = 1;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    for_each_value(graph.nodes[i].arguments,
                   [&](ValueId value) { reads[i] |= is_written[groups.of(value)]; });
  return reads;
}

class DeferredChoice {
 public:
  DeferredChoice(const Graph& graph, const BackwardRoles& roles)
      : graph_(graph),
        roles_(roles),
        maker_(graph.values.size(), kNoSuchNode),
        early_(graph.nodes.size(), 0),
        heavy_(graph.nodes.size(), 0),
        must_wait_(graph.nodes.size(), 0) {
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
      for_each_value(graph.nodes[i].results, [&](ValueId value) { maker_[index_of(value)] = i; });
      heavy_[i] = !only_views(graph.nodes[i]) && !is_cheap(graph.nodes[i]);
    }
  }

  std::vector<std::size_t> run() {
    mark_needed_early();
    if (!has_gradient_of_input()) mark_chain();
    mark_heavy_that_wait();
    if (std::find(must_wait_.begin(), must_wait_.end(), 1) == must_wait_.end()) return {};
    return cut();
  }

 private:
  bool is_deferrable(std::size_t output) const {
    return output < roles_.tensor.size() && roles_.is_parameter[roles_.tensor[output]];
  }

  // Whether a tensor that is not a parameter has a gradient.
  bool has_gradient_of_input() const {
    for (std::size_t i = 0; i < roles_.tensor.size(); ++i)
      if (!is_deferrable(i) && graph_.outputs[i].value() != kNoValue) return true;
    return false;
  }

  // What other outputs need, and what keeps an order.
  void mark_needed_early() {
    const std::vector<char> reads_written = readers_of_written(graph_, roles_);
    std::vector<char> needed(graph_.values.size(), 0);
    for (std::size_t i = 0; i < graph_.outputs.size(); ++i)
      if (!is_deferrable(i))
        for (const ValueId value : graph_.outputs[i].values)
          if (value != kNoValue) needed[index_of(value)] = 1;
    for (std::size_t i = graph_.nodes.size(); i-- > 0;) {
      const Node& node = graph_.nodes[i];
      bool early = must_run(node) || reads_written[i] != 0;
      for_each_value(node.results, [&](ValueId value) { early |= needed[index_of(value)] != 0; });
      if (!early) continue;
      early_[i] = 1;
      for_each_value(node.arguments, [&](ValueId value) { needed[index_of(value)] = 1; });
    }
  }

  // Without a gradient of an input every node leads to parameters alone. Those that make the arguments of a
  // heavy operator out of gradients belong to the chain.
  void mark_chain() {
    std::vector<char> of_tangents(graph_.values.size(), 0);
    for (std::size_t i = roles_.saved; i < roles_.saved + roles_.tangents; ++i)
      of_tangents[index_of(graph_.inputs[i].value)] = 1;
    for (const Node& node : graph_.nodes) {
      bool depends = false;
      for_each_value(node.arguments, [&](ValueId value) { depends |= of_tangents[index_of(value)] != 0; });
      if (depends) for_each_value(node.results, [&](ValueId value) { of_tangents[index_of(value)] = 1; });
    }
    std::vector<char> used_early(graph_.values.size(), 0);
    for (std::size_t i = graph_.nodes.size(); i-- > 0;) {
      const Node& node = graph_.nodes[i];
      for_each_value(node.results, [&](ValueId value) { early_[i] |= used_early[index_of(value)]; });
      for_each_value(node.arguments, [&](ValueId value) {
        if (early_[i] || (heavy_[i] && of_tangents[index_of(value)])) used_early[index_of(value)] = 1;
      });
    }
  }

  void mark_heavy_that_wait() {
    std::vector<char> leads_to_large(graph_.values.size(), 0);
    for (std::size_t i = 0; i < graph_.outputs.size(); ++i)
      if (const ValueId value = graph_.outputs[i].value(); value != kNoValue && is_deferrable(i))
        leads_to_large[index_of(value)] |= graph_[value].geometry.sizes.size() > 1;
    for (std::size_t i = graph_.nodes.size(); i-- > 0;) {
      const Node& node = graph_.nodes[i];
      bool leads = false;
      for_each_value(node.results, [&](ValueId value) { leads |= leads_to_large[index_of(value)] != 0; });
      if (!leads) continue;
      for_each_value(node.arguments, [&](ValueId value) { leads_to_large[index_of(value)] = 1; });
      must_wait_[i] = !early_[i] && heavy_[i];
    }
  }

  // The source side is computed early. An edge that is cut is memory that must be kept, or work that does not
  // wait. Of equal cuts the one is taken in which the most waits.
  std::vector<std::size_t> cut() const {
    const MemoryGroups groups(graph_);
    const std::size_t nodes = graph_.nodes.size(), source = nodes + groups.count(), sink = source + 1;
    MaxFlow flow(sink + 1);
    const auto connect = [&](std::size_t from, std::size_t to, double capacity) {
      flow.set_capacity(flow.add_edge(from, to), capacity);
    };
    // Who makes a memory: a node that may wait, or the source.
    std::vector<std::size_t> made_by(groups.count(), kNoSuchNode);
    for (std::size_t i = 0; i < nodes; ++i)
      for_each_value(graph_.nodes[i].results, [&](ValueId value) {
        std::size_t& by = made_by[groups.of(value)];
        if (by == kNoSuchNode) by = early_[i] || groups.is_given(groups.of(value)) ? source : i;
      });
    std::vector<char> is_free(groups.count(), 0), is_used(groups.count(), 0);
    for (std::size_t i = 0; i < roles_.saved; ++i)
      if (roles_.is_static[i]) is_free[groups.of(graph_.inputs[i].value)] = 1;
    for (const ConstantTensor& constant : graph_.constants) is_free[groups.of(constant.value)] = 1;
    for (std::size_t i = 0; i < nodes; ++i) {
      if (early_[i]) continue;
      for_each_value(graph_.nodes[i].arguments, [&](ValueId value) {
        const std::size_t group = groups.of(value), maker = maker_[index_of(value)];
        // What is computed early can need nothing that waits.
        if (maker != kNoSuchNode && !early_[maker]) connect(i, maker, MaxFlow::kUnlimited);
        if (is_free[group] || made_by[group] == i) return;
        is_used[group] = 1;
        connect(nodes + group, i, MaxFlow::kUnlimited);
      });
      connect(i, sink,
              must_wait_[i] ? MaxFlow::kUnlimited
                            : kBytesForWork * static_cast<double>(cost_of_node(graph_, graph_.nodes[i])));
    }
    for (std::size_t group = 0; group < groups.count(); ++group)
      if (is_used[group])
        connect(made_by[group] == kNoSuchNode ? source : made_by[group], nodes + group,
                static_cast<double>(groups.bytes(group)));
    flow.run(source, sink);
    std::vector<std::size_t> deferred;
    for (std::size_t i = 0; i < nodes; ++i)
      if (!early_[i] && !flow.reached()[i]) deferred.push_back(i);
    return deferred;
  }

  const Graph& graph_;
  const BackwardRoles& roles_;
  std::vector<std::size_t> maker_;               // by value: the node that makes it
  std::vector<char> early_, heavy_, must_wait_;  // by node
};

std::vector<char> marks_of(const std::vector<std::size_t>& places, std::size_t count) {
  std::vector<char> flags(count, 0);
  for (const std::size_t place : places) flags[place] = 1;
  return flags;
}

// Where the values of a backward graph go when it is split.
class BackwardCut {
 public:
  BackwardCut(const Graph& graph, const BackwardRoles& roles, const std::vector<std::size_t>& deferred)
      : graph_(graph),
        roles_(roles),
        groups_(graph),
        waits_(marks_of(deferred, graph.nodes.size())),
        made_late_(graph.values.size(), 0),
        used_late_(graph.values.size(), 0),
        used_early_(graph.values.size(), 0) {
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
      for_each_value(graph.nodes[i].arguments,
                     [&](ValueId value) { (waits_[i] ? used_late_ : used_early_)[index_of(value)] = 1; });
      if (waits_[i])
        for_each_value(graph.nodes[i].results, [&](ValueId value) { made_late_[index_of(value)] = 1; });
    }
    parts_.is_deferred.assign(roles.is_parameter.size(), 0);
    for (std::size_t i = 0; i < roles.tensor.size(); ++i)
      if (const ValueId value = graph.outputs[i].value(); value != kNoValue && made_late_[index_of(value)])
        parts_.is_deferred[roles.tensor[i]] = 1;
    for (std::size_t i = 0; i < graph.outputs.size(); ++i)
      for (const ValueId value : graph.outputs[i].values)
        if (value != kNoValue) (returned_late(i) ? used_late_ : used_early_)[index_of(value)] = 1;
  }

  BackwardParts run() {
    choose_inputs();
    const auto waiting = static_cast<std::size_t>(std::count(waits_.begin(), waits_.end(), 1));
    PartOfGraph inputs(graph_, graph_.nodes.size() - waiting), weights(graph_, waiting);
    const auto add_input = [&](PartOfGraph& part, std::size_t input) {
      part.add_input(graph_.inputs[input].value, graph_.inputs[input].name);
    };
    for (const std::size_t input : parts_.inputs.saved) add_input(inputs, input);
    for (std::size_t i = roles_.saved; i < graph_.inputs.size(); ++i) add_input(inputs, i);
    for (const std::size_t input : parts_.weights.saved) add_input(weights, input);
    for (const ValueId value : kept_) weights.add_input(value, fmt::format("kept_{}", index_of(value)));
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i)
      (waits_[i] ? weights : inputs).add_node(graph_.nodes[i]);
    const Operand nothing = Operand::of(kNoValue);
    for (std::size_t i = 0; i < roles_.results; ++i) {
      inputs.add_output(returned_late(i) ? nothing : graph_.outputs[i]);
      weights.add_output(returned_late(i) ? graph_.outputs[i] : nothing);
    }
    for (const ValueId value : kept_) inputs.add_output(Operand::of(value));
    for (std::size_t i = roles_.results; i < graph_.outputs.size(); ++i) inputs.add_output(graph_.outputs[i]);
    note_requests();
    parts_.kept = kept_.size();
    parts_.inputs.graph = inputs.finish();
    parts_.weights.graph = weights.finish();
    return std::move(parts_);
  }

 private:
  bool returned_late(std::size_t output) const {
    return output < roles_.tensor.size() && parts_.is_deferred[roles_.tensor[output]];
  }

  void choose_inputs() {
    std::vector<char> at_hand(graph_.values.size(), 0);  // later, without being kept
    for (const ConstantTensor& constant : graph_.constants) at_hand[index_of(constant.value)] = 1;
    for (std::size_t i = 0; i < roles_.saved; ++i) {
      const std::size_t value = index_of(graph_.inputs[i].value);
      if (used_early_[value]) parts_.inputs.saved.push_back(i);
      if (used_late_[value]) parts_.weights.saved.push_back(i);
      at_hand[value] = 1;
    }
    for (std::size_t i = 0; i < graph_.values.size(); ++i)
      if (used_late_[i] && !made_late_[i] && !at_hand[i])
        kept_.push_back(ValueId{static_cast<std::int32_t>(i)});
  }

  // Memory may be overwritten by the part that reads it last, unless somebody outside has it, too: whoever
  // gave it, or got a gradient in it.
  void note_requests() {
    std::vector<char> outside(groups_.count(), 0), late(groups_.count(), 0);
    for (const ConstantTensor& constant : graph_.constants) outside[groups_.of(constant.value)] = 1;
    for (std::size_t i = 0; i < graph_.inputs.size(); ++i)
      if (i >= roles_.saved || !roles_.is_donated[i]) outside[groups_.of(graph_.inputs[i].value)] = 1;
    for (const std::size_t input : parts_.weights.saved) late[groups_.of(graph_.inputs[input].value)] = 1;
    for (const ValueId value : kept_) late[groups_.of(value)] = 1;
    const auto note_saved = [&](BackwardPart& part, const auto& is_taken) {
      for (std::size_t i = 0; i < part.saved.size(); ++i) {
        const std::size_t input = part.saved[i], group = groups_.of(graph_.inputs[input].value);
        if (roles_.is_static[input]) part.static_inputs.push_back(i);
        if (!outside[group] && !is_taken(group)) part.donated_inputs.push_back(i);
      }
    };
    note_saved(parts_.inputs, [&](std::size_t group) { return late[group] != 0; });
    for (std::size_t i = 0; i < graph_.outputs.size(); ++i)
      for (const ValueId value : graph_.outputs[i].values)
        if (value != kNoValue && !returned_late(i)) outside[groups_.of(value)] = 1;
    note_saved(parts_.weights, [](std::size_t) { return false; });
    for (std::size_t i = 0; i < kept_.size(); ++i)
      if (!outside[groups_.of(kept_[i])])
        parts_.weights.donated_inputs.push_back(parts_.weights.saved.size() + i);
  }

  const Graph& graph_;
  const BackwardRoles& roles_;
  const MemoryGroups groups_;
  const std::vector<char> waits_;                         // by node
  std::vector<char> made_late_, used_late_, used_early_;  // by value
  std::vector<ValueId> kept_;
  BackwardParts parts_;
};

}  // namespace

Graph with_divided_convolutions(Graph backward) {
  constexpr std::size_t kMask = 10;  // output_mask, the last argument
  std::vector<Node> nodes;
  nodes.reserve(backward.nodes.size());
  for (Node& node : backward.nodes) {
    const bool divides = node.op.operator_name().name == "aten::convolution_backward" &&
                         node.arguments.size() == kMask + 1 && node.results.size() == 3 &&
                         node.arguments[kMask].constant.isBoolList() && node.results[0].value() != kNoValue &&
                         (node.results[1].value() != kNoValue || node.results[2].value() != kNoValue);
    if (divides) {
      const c10::List<bool> mask = node.arguments[kMask].constant.toBoolList();
      Node of_input = node;
      of_input.arguments[kMask].constant = c10::List<bool>({mask.get(0), false, false});
      of_input.results[1] = of_input.results[2] = Operand::of(kNoValue);
      node.arguments[kMask].constant = c10::List<bool>({false, mask.get(1), mask.get(2)});
      node.results[0] = Operand::of(kNoValue);
      nodes.push_back(std::move(of_input));
    }
    nodes.push_back(std::move(node));
  }
  backward.nodes = std::move(nodes);
  return backward;
}

std::vector<std::size_t> choose_deferred(const Graph& backward, const BackwardRoles& roles) {
  return DeferredChoice(backward, roles).run();
}

std::string why_not_deferred(const Graph& backward, const BackwardRoles& roles,
                             const std::vector<std::size_t>& deferred) {
  for (std::size_t i = 0; i < deferred.size(); ++i)
    if (deferred[i] >= backward.nodes.size() || (i > 0 && deferred[i] <= deferred[i - 1]))
      return "nodes that do not exist, or in another order, are deferred";
  const std::vector<char> waits = marks_of(deferred, backward.nodes.size()),
                          reads_written = readers_of_written(backward, roles);
  std::vector<std::size_t> late(backward.values.size(), kNoSuchNode);  // by value: the deferred node
  for (const std::size_t node : deferred) {
    if (must_run(backward.nodes[node]))
      return fmt::format("node {}, which must keep its order, is deferred", node);
    if (reads_written[node])
      return fmt::format("node {}, which reads memory that backward writes, is deferred", node);
    for_each_value(backward.nodes[node].results, [&](ValueId value) { late[index_of(value)] = node; });
  }
  std::string why;
  for (std::size_t i = 0; i < backward.nodes.size() && why.empty(); ++i)
    if (!waits[i])
      for_each_value(backward.nodes[i].arguments, [&](ValueId value) {
        if (late[index_of(value)] != kNoSuchNode)
          why = fmt::format("node {} needs node {}, which is deferred", i, late[index_of(value)]);
      });
  for (std::size_t i = 0; i < backward.outputs.size() && why.empty(); ++i)
    if (i >= roles.tensor.size() || !roles.is_parameter[roles.tensor[i]])
      for (const ValueId value : backward.outputs[i].values)
        if (value != kNoValue && late[index_of(value)] != kNoSuchNode)
          why = fmt::format("output {} needs node {}, which is deferred", i, late[index_of(value)]);
  return why;
}

BackwardParts split_backward_graph(const Graph& backward, const BackwardRoles& roles,
                                   const std::vector<std::size_t>& deferred) {
  return BackwardCut(backward, roles, deferred).run();
}

}  // namespace penstock::graph
