// Changes of a graph that keep what it computes: equal nodes become one, patterns become something else.
//
//   merge_common_subexpressions(graph);
//
//   Rule rule;                                     // x * sigmoid(x) becomes silu(x)
//   rule.pattern = capture_forward([](const Values& in) -> Values { at::Tensor x = in[0].toTensor(); return {x * x.sigmoid()}; }, {example});
//   rule.replacement = capture_forward([](const Values& in) -> Values { return {at::silu(in[0].toTensor())}; }, {example});
//   std::size_t places = rewrite(graph, rule);
//
// Graphs must not write: both throw ValueError for one that does. Thread rule: as for a standard container.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// Of nodes with the same operator and arguments in the same half, all but the first go. Random nodes and side effects stay, and so do nodes whose results
// share memory with an output: two outputs do not become one tensor. Returns how many went.
std::size_t merge_common_subexpressions(Graph& graph);

// Where a pattern was found.
struct Match {
  std::vector<ValueId> inputs;      // what stands for each input of the pattern
  std::vector<std::size_t> nodes;   // of the graph, one for each node of the pattern
};

struct Rule {
  // Inputs stand for any tensors, the same input for the same tensor; shapes do not matter, constants must be the same. The one output is
  // what the last node gives; every other node leads to it. Neither pattern nor replacement may hold tensors of its own.
  Graph pattern;
  // As many inputs, one output, of the same shape and layout as what it replaces; shapes are found anew for each place.
  Graph replacement;
  // Asked for each place, when set: false leaves it alone.
  std::function<bool(const Graph& graph, const Match& match)> accept;
};

// Replaces the places that do not overlap, from the last to the first, where nothing else uses what the pattern's other nodes give.
// Returns how many. Throws ValueError for a rule that is not as said, or whose replacement gives a tensor of another shape.
std::size_t rewrite(Graph& graph, const Rule& rule);

}  // namespace penstock::graph
