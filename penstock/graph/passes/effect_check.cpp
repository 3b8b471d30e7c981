#include "penstock/graph/passes/effect_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "penstock/graph/ir/constant_value.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/state_operator.h"

namespace penstock::graph {
namespace {

using Sequence = std::vector<const Node*>;
using Ids = std::vector<std::vector<ValueId>>;

// ---- one operator ----

bool same_shapes(const Graph& a, const Operand& x, const Graph& b, const Operand& y) {
  return std::equal(x.values.begin(), x.values.end(), y.values.begin(), y.values.end(),
                    [&](ValueId first, ValueId second) {
                      if (first == kNoValue || second == kNoValue) return first == second;
                      const Geometry &was = a[first].geometry, &is = b[second].geometry;
                      return was.sizes == is.sizes && was.dtype == is.dtype && was.device == is.device;
                    });
}

bool same_operand_kinds(const Graph& a, const std::vector<Operand>& x, const Graph& b,
                        const std::vector<Operand>& y) {
  return std::equal(x.begin(), x.end(), y.begin(), y.end(), [&](const Operand& first, const Operand& second) {
    if (first.kind != second.kind || !same_shapes(a, first, b, second)) return false;
    if (first.kind != Operand::Kind::Constant) return true;
    // A constant that depends on sizes is one of the table.
    if (first.symbolic != kNotSymbolic || second.symbolic != kNotSymbolic)
      return first.symbolic == second.symbolic;
    return same_constant(first.constant, second.constant);
  });
}

bool same_call(const Graph& a, const Node& x, const Graph& b, const Node& y) {
  return x.op.operator_name() == y.op.operator_name() && x.phase == y.phase &&
         same_operand_kinds(a, x.arguments, b, y.arguments) && same_operand_kinds(a, x.results, b, y.results);
}

// ---- sequences ----

template <class Wanted>
Sequence nodes_of(const Graph& graph, const Wanted& wanted) {
  Sequence nodes;
  for (const Node& node : graph.nodes)
    if (wanted(node)) nodes.push_back(&node);
  return nodes;
}

Ids ids_of(const Sequence& nodes, std::vector<Operand> Node::*operands) {
  Ids all;
  for (const Node* node : nodes) {
    std::vector<ValueId> ids;
    for (const Operand& operand : node->*operands)
      ids.insert(ids.end(), operand.values.begin(), operand.values.end());
    all.push_back(std::move(ids));
  }
  return all;
}

// The place of the first one that has changed places with another, if the same ones are there.
std::optional<std::size_t> exchanged(const Ids& was, const Ids& is) {
  Ids sorted_was = was, sorted_is = is;
  std::sort(sorted_was.begin(), sorted_was.end());
  std::sort(sorted_is.begin(), sorted_is.end());
  if (sorted_was != sorted_is) return std::nullopt;
  for (std::size_t i = 0; i < was.size(); ++i)
    if (was[i] != is[i]) return i;
  return std::nullopt;
}

std::string difference(const Graph& before, const Sequence& was, const Graph& after, const Sequence& is,
                       const char* what) {
  const std::size_t common = std::min(was.size(), is.size());
  for (std::size_t i = 0; i < common; ++i)
    if (!same_call(before, *was[i], after, *is[i]))
      return fmt::format("of its {}, number {} is {}, expected {}, in the same order", what, i,
                         to_text(after, *is[i]), to_text(before, *was[i]));
  if (was.size() > common)
    return fmt::format("it has {} {}, expected {}: {} is missing", is.size(), what, was.size(),
                       to_text(before, *was[common]));
  if (is.size() > common)
    return fmt::format("it has {} {}, expected {}: {} was added", is.size(), what, was.size(),
                       to_text(after, *is[common]));
  for (const auto operands : {&Node::results, &Node::arguments})
    if (const auto place = exchanged(ids_of(was, operands), ids_of(is, operands)))
      return fmt::format(
          "of its {}, number {} is {}, which was at another place, expected {}, in the same order", what,
          *place, to_text(after, *is[*place]), to_text(before, *was[*place]));
  return {};
}

// ---- states that are arguments ----

// From the state that is returned back to the one that is given; the last operator first.
Sequence chain_to(ValueId state, const std::vector<const Node*>& maker) {
  Sequence chain;
  while (const Node* node = maker[index_of(state)]) {
    const auto inside = operator_inside(node->op);
    if (!inside || node->results.back().value() != state) break;
    chain.push_back(node);
    state = node->arguments.at(inside->op.schema().arguments().size()).value();
    if (state == kNoValue) break;
  }
  return chain;
}

std::vector<const Node*> makers_of(const Graph& graph) {
  std::vector<const Node*> maker(graph.values.size(), nullptr);
  for (const Node& node : graph.nodes)
    for_each_value(node.results, [&](ValueId value) { maker[index_of(value)] = &node; });
  return maker;
}

std::string difference_of_chains(const Graph& before, const Graph& after) {
  const std::vector<const Node*> made_before = makers_of(before), made_after = makers_of(after);
  for (std::size_t i = 0; i < before.outputs.size() && i < after.outputs.size(); ++i) {
    const ValueId was = before.outputs[i].value(), is = after.outputs[i].value();
    if (was == kNoValue || is == kNoValue) continue;
    std::string found =
        difference(before, chain_to(was, made_before), after, chain_to(is, made_after), "draws and effects");
    if (!found.empty()) return fmt::format("before output {}, counted from there, {}", i, found);
  }
  return {};
}

}  // namespace

std::string difference_of_effects(const Graph& before, const Graph& after) {
  const auto compare = [&](const auto& wanted, const char* what) {
    return difference(before, nodes_of(before, wanted), after, nodes_of(after, wanted), what);
  };
  std::string found =
      compare([](const Node& node) { return must_run(node) && !is_collective(node); }, "draws and effects");
  if (found.empty()) found = compare([](const Node& node) { return has_side_effect(node); }, "effects");
  return found.empty() ? difference_of_chains(before, after) : found;
}

}  // namespace penstock::graph
