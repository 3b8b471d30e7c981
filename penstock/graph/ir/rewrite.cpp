#include "penstock/graph/ir/rewrite.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <unordered_map>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/hash.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/constant_value.h"
#include "penstock/graph/ir/shape_inference.h"

namespace penstock::graph {
namespace {

void refuse_writes(const Graph& graph, const char* who) {
  if (const std::size_t writing = count_writes(graph); writing > 0)
    throw ValueError(fmt::format(
        "graph: {}: the graph has {} nodes that write memory, expected none; functionalize it first", who,
        writing));
}

bool same_operands(const std::vector<Operand>& a, const std::vector<Operand>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Operand& x, const Operand& y) {
    return x.kind == y.kind && x.values == y.values && x.symbolic == y.symbolic &&
           (x.kind != Operand::Kind::Constant || same_constant(x.constant, y.constant));
  });
}

// Whether each result that `node` has is one that `twin` has. Backward, once it is split off, lacks the
// results of nodes that it computes again and that forward has saved.
bool has_results_of(const Node& twin, const Node& node) {
  for (std::size_t i = 0; i < node.results.size(); ++i)
    for (std::size_t j = 0; j < node.results[i].values.size(); ++j)
      if (node.results[i].values[j] != kNoValue && twin.results[i].values[j] == kNoValue) return false;
  return true;
}

std::size_t hash_of_node(const Node& node) {
  HashBuilder hash;
  hash.add(static_cast<const void*>(&node.op.schema())).add(static_cast<int>(node.phase));
  hash.add(static_cast<int>(node.grad_enabled));
  for (const Operand& operand : node.arguments) {
    if (operand.kind == Operand::Kind::Constant) hash.add(hash_of_constant(operand.constant));
    for (const ValueId value : operand.values) hash.add(static_cast<std::int32_t>(value));
  }
  return hash.value();
}

// ---- patterns ----

constexpr std::size_t kNoNode = static_cast<std::size_t>(-1);

void check_rule(const Rule& rule) {
  for (const Graph* graph : {&rule.pattern, &rule.replacement}) {
    const char* who = graph == &rule.pattern ? "pattern" : "replacement";
    verify(*graph);
    refuse_writes(*graph, who);
    if (!graph->constants.empty())
      throw ValueError(
          fmt::format("graph: the {} of a rule contains {} tensor constants, expected none; make them inputs",
                      who, graph->constants.size()));
    if (graph->outputs.size() != 1 || graph->outputs[0].value() == kNoValue)
      throw ValueError(fmt::format("graph: the {} of a rule has {} outputs, expected one tensor", who,
                                   graph->outputs.size()));
  }
  if (rule.pattern.inputs.size() != rule.replacement.inputs.size())
    throw ValueError(fmt::format(
        "graph: the pattern of a rule has {} inputs, the replacement {}; give both the same number",
        rule.pattern.inputs.size(), rule.replacement.inputs.size()));
  const std::vector<Node>& nodes = rule.pattern.nodes;
  if (nodes.empty() || nodes.back().results.size() != 1 ||
      nodes.back().results[0].value() != rule.pattern.outputs[0].value())
    throw ValueError(
        "graph: the output of a rule's pattern is not the result of its last node; end the pattern with the "
        "value it replaces");
}

class Matcher {
 public:
  Matcher(const Graph& graph, const Graph& pattern)
      : graph_(graph), pattern_(pattern), maker_(makers_of(graph)), maker_in_pattern_(makers_of(pattern)) {
    uses_.resize(graph.values.size(), 0);
    for (const Node& node : graph.nodes)
      for_each_value(node.arguments, [&](ValueId value) { ++uses_[index_of(value)]; });
    for_each_value(graph.outputs, [&](ValueId value) { ++uses_[index_of(value)]; });
  }

  // Matches with the pattern's last node at `root`.
  std::optional<Match> match_at(std::size_t root) {
    values_.assign(pattern_.values.size(), kNoValue);
    nodes_.assign(pattern_.nodes.size(), kNoNode);
    if (!match_node(pattern_.nodes.size() - 1, root) || std::count(nodes_.begin(), nodes_.end(), kNoNode) > 0)
      return std::nullopt;
    if (!inner_values_are_free(root)) return std::nullopt;
    Match match;
    match.nodes = nodes_;
    for (const Placeholder& input : pattern_.inputs) match.inputs.push_back(values_[index_of(input.value)]);
    return match;
  }

 private:
  static std::vector<std::size_t> makers_of(const Graph& graph) {
    std::vector<std::size_t> maker(graph.values.size(), kNoNode);
    for (std::size_t i = 0; i < graph.nodes.size(); ++i)
      for_each_value(graph.nodes[i].results, [&](ValueId value) { maker[index_of(value)] = i; });
    return maker;
  }

  bool match_node(std::size_t wanted, std::size_t actual) {
    if (nodes_[wanted] != kNoNode) return nodes_[wanted] == actual;
    const Node &a = pattern_.nodes[wanted], &b = graph_.nodes[actual];
    if (&a.op.schema() != &b.op.schema()) return false;
    nodes_[wanted] = actual;
    for (std::size_t i = 0; i < a.results.size(); ++i) {
      if (a.results[i].values.size() != b.results[i].values.size()) return false;
      for (std::size_t j = 0; j < a.results[i].values.size(); ++j)
        if (a.results[i].values[j] != kNoValue)
          values_[index_of(a.results[i].values[j])] = b.results[i].values[j];
    }
    for (std::size_t i = 0; i < a.arguments.size(); ++i) {
      const Operand &x = a.arguments[i], &y = b.arguments[i];
      if (x.kind != y.kind || x.values.size() != y.values.size()) return false;
      if (x.symbolic != y.symbolic ||
          (x.kind == Operand::Kind::Constant && !same_constant(x.constant, y.constant)))
        return false;
      for (std::size_t j = 0; j < x.values.size(); ++j)
        if (!match_value(x.values[j], y.values[j])) return false;
    }
    return true;
  }

  bool match_value(ValueId wanted, ValueId actual) {
    if (wanted == kNoValue || actual == kNoValue) return wanted == actual;
    const std::size_t maker = maker_in_pattern_[index_of(wanted)];
    if (maker != kNoNode &&
        (maker_[index_of(actual)] == kNoNode || !match_node(maker, maker_[index_of(actual)])))
      return false;
    ValueId& known = values_[index_of(wanted)];
    if (known == kNoValue) known = actual;
    return known == actual;
  }

  // Whether the results of the inner nodes are used only inside the match.
  bool inner_values_are_free(std::size_t root) const {
    std::unordered_map<std::int32_t, std::size_t> inside;
    for (const std::size_t node : nodes_)
      for_each_value(graph_.nodes[node].arguments,
                     [&](ValueId value) { ++inside[static_cast<std::int32_t>(value)]; });
    bool free = true;
    for (const std::size_t node : nodes_)
      if (node != root)
        for_each_value(graph_.nodes[node].results, [&](ValueId value) {
          const auto found = inside.find(static_cast<std::int32_t>(value));
          free &= uses_[index_of(value)] == (found == inside.end() ? 0 : found->second);
        });
    return free;
  }

  const Graph &graph_, &pattern_;
  const std::vector<std::size_t> maker_, maker_in_pattern_;
  std::vector<std::size_t> uses_;
  std::vector<ValueId> values_;     // by value of the pattern
  std::vector<std::size_t> nodes_;  // by node of the pattern
};

// Inserts the replacement at the match's last node; the other nodes of the match become dead.
class Replacing {
 public:
  Replacing(Graph& graph, const Rule& rule, const Match& match) : graph_(graph), rule_(rule), match_(match) {}

  std::vector<Node> run() {
    const Node root = graph_.nodes[match_.nodes.back()];
    const ValueId old = root.results[0].value();
    std::vector<ValueId> values(rule_.replacement.values.size(), kNoValue);
    for (std::size_t i = 0; i < match_.inputs.size(); ++i)
      values[index_of(rule_.replacement.inputs[i].value)] = match_.inputs[i];
    std::vector<Node> made;
    for (const Node& node : rule_.replacement.nodes) {
      Node copied{node.op, node.arguments, {}, root.phase, root.grad_enabled};
      for (Operand& operand : copied.arguments)
        for (ValueId& value : operand.values)
          if (value != kNoValue) value = values[index_of(value)];
      copied.results = infer_results(graph_, copied);
      for (std::size_t i = 0; i < node.results.size(); ++i) {
        PENSTOCK_INVARIANT(node.results[i].values.size() == copied.results[i].values.size(),
                           "an operator returns a different number of tensors than in the rule");
        for (std::size_t j = 0; j < node.results[i].values.size(); ++j)
          if (node.results[i].values[j] != kNoValue)
            values[index_of(node.results[i].values[j])] = copied.results[i].values[j];
      }
      made.push_back(std::move(copied));
    }
    const ValueId fresh = values[index_of(rule_.replacement.outputs[0].value())];
    const Geometry &is = graph_[fresh].geometry, &was = graph_[old].geometry;
    if (is.sizes != was.sizes || is.strides != was.strides || is.dtype != was.dtype ||
        is.device != was.device)
      throw ValueError(fmt::format(
          "graph: a replacement produces {} for {}; it must have the same shape, layout and dtype",
          to_text(is), to_text(was)));
    share_memory(old, fresh);
    const auto exchange = [&](std::vector<Operand>& operands) {
      for (Operand& operand : operands)
        for (ValueId& value : operand.values)
          if (value == old) value = fresh;
    };
    for (std::size_t i = match_.nodes.back() + 1; i < graph_.nodes.size(); ++i)
      exchange(graph_.nodes[i].arguments);
    exchange(graph_.outputs);
    return made;
  }

 private:
  // Makes views of the old value views of the new one.
  void share_memory(ValueId old, ValueId fresh) {
    const StorageId from = graph_[old].storage, to = graph_[fresh].storage;
    for (Value& value : graph_.values)
      if (value.storage == from) value.storage = to;
  }

  Graph& graph_;
  const Rule& rule_;
  const Match& match_;
};

}  // namespace

std::size_t merge_common_subexpressions(Graph& graph) {
  refuse_writes(graph, "common subexpressions");
  std::vector<ValueId> stands_for(graph.values.size());
  for (std::size_t i = 0; i < stands_for.size(); ++i) stands_for[i] = ValueId{static_cast<std::int32_t>(i)};
  std::vector<char> is_output_memory(static_cast<std::size_t>(graph.storages), 0);
  for_each_value(graph.outputs, [&](ValueId value) { is_output_memory[index_of(graph[value].storage)] = 1; });
  // By storage: the one that it has become. A node that goes has new memory, or is a view of memory that its
  // twin views, too; what it is merged into has not been merged itself.
  std::vector<StorageId> memory_now(static_cast<std::size_t>(graph.storages));
  for (std::size_t i = 0; i < memory_now.size(); ++i) memory_now[i] = StorageId{static_cast<std::int32_t>(i)};
  bool any_joined = false;
  const auto translate = [&](std::vector<Operand>& operands) {
    for (Operand& operand : operands)
      for (ValueId& value : operand.values)
        if (value != kNoValue) value = stands_for[index_of(value)];
  };
  std::unordered_multimap<std::size_t, std::size_t> seen;  // indices into `kept`
  std::vector<Node> kept;
  kept.reserve(graph.nodes.size());
  std::size_t removed = 0;
  for (Node& node : graph.nodes) {
    translate(node.arguments);
    bool stays = must_run(node);
    for_each_value(node.results,
                   [&](ValueId value) { stays |= is_output_memory[index_of(graph[value].storage)] != 0; });
    const Node* twin = nullptr;
    const std::size_t hash = stays ? 0 : hash_of_node(node);
    if (!stays)
      for (auto [entry, end] = seen.equal_range(hash); entry != end && !twin; ++entry) {
        const Node& other = kept[entry->second];
        if (&other.op.schema() == &node.op.schema() && other.phase == node.phase &&
            other.grad_enabled == node.grad_enabled && same_operands(other.arguments, node.arguments) &&
            has_results_of(other, node))
          twin = &other;
      }
    if (!twin) {
      if (!stays) seen.emplace(hash, kept.size());
      kept.push_back(std::move(node));
      continue;
    }
    ++removed;
    for (std::size_t i = 0; i < node.results.size(); ++i)
      for (std::size_t j = 0; j < node.results[i].values.size(); ++j) {
        const ValueId mine = node.results[i].values[j], other = twin->results[i].values[j];
        if (mine == kNoValue) continue;
        // Views of either become views of the one that remains.
        const std::size_t from = index_of(graph[mine].storage);
        if (const StorageId to = memory_now[index_of(graph[other].storage)]; memory_now[from] != to) {
          memory_now[from] = to;
          any_joined = true;
        }
        stands_for[index_of(mine)] = other;
      }
  }
  graph.nodes = std::move(kept);
  if (removed == 0) return 0;
  translate(graph.outputs);
  if (any_joined)
    for (Value& value : graph.values) value.storage = memory_now[index_of(value.storage)];
  verify(graph);
  return removed;
}

std::size_t rewrite(Graph& graph, const Rule& rule) {
  check_rule(rule);
  refuse_writes(graph, "rewriting");
  std::size_t places = 0;
  std::optional<Matcher> matcher;
  for (std::size_t position = graph.nodes.size(); position-- > 0;) {
    if (&graph.nodes[position].op.schema() != &rule.pattern.nodes.back().op.schema()) continue;
    if (!matcher) matcher.emplace(graph, rule.pattern);
    const std::optional<Match> match = matcher->match_at(position);
    if (!match || (rule.accept && !rule.accept(graph, *match))) continue;
    std::vector<Node> made = Replacing(graph, rule, *match).run();
    const auto begin = graph.nodes.begin();
    std::vector<char> goes(graph.nodes.size(), 0);
    for (const std::size_t node : match->nodes) goes[node] = 1;
    std::vector<Node> nodes;
    nodes.reserve(graph.nodes.size() + made.size());
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
      if (i == position) std::move(made.begin(), made.end(), std::back_inserter(nodes));
      if (!goes[i]) nodes.push_back(std::move(*(begin + static_cast<std::ptrdiff_t>(i))));
    }
    graph.nodes = std::move(nodes);
    matcher.reset();
    position -= static_cast<std::size_t>(
        std::count(goes.begin(), goes.begin() + static_cast<std::ptrdiff_t>(position), char{1}));
    ++places;
  }
  if (places > 0) verify(graph);
  return places;
}

}  // namespace penstock::graph
