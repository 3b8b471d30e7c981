// Semantics-preserving transformations of a graph: merging equal nodes, replacing patterns.
//
//   merge_common_subexpressions(graph);
//
//   Rule rule;                                     // x * sigmoid(x) becomes silu(x)
//   rule.pattern = capture_forward(
//       [](const Values& in) -> Values { return {in[0].toTensor() * in[0].toTensor().sigmoid()}; },
//       {example});
//   rule.replacement = capture_forward(
//       [](const Values& in) -> Values { return {at::silu(in[0].toTensor())}; }, {example});
//   std::size_t places = rewrite(graph, rule);
//
// Both throw ValueError for a graph that writes. Thread safety: that of a standard container.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// Merges nodes of the same phase that have the same operator and arguments into the first of them. Keeps
// random nodes, nodes with side effects, and nodes whose results share memory with an output, so that two
// outputs do not become one tensor. Returns the number of removed nodes.
std::size_t merge_common_subexpressions(Graph& graph);

// Where a pattern was found.
struct Match {
  std::vector<ValueId> inputs;     // the values matched by the inputs of the pattern
  std::vector<std::size_t> nodes;  // of the graph, one for each node of the pattern
};

struct Rule {
  // Inputs match any tensor, and the same input always the same tensor; shapes are ignored, constants must be
  // equal. The single output is the result of the last node, and every other node must contribute to it.
  // Neither pattern nor replacement may contain tensor constants.
  Graph pattern;
  // Has the same number of inputs and one output of the same shape and layout as the value it replaces;
  // shapes are inferred again for each match.
  Graph replacement;
  // If set, called for each match; returning false skips it.
  std::function<bool(const Graph& graph, const Match& match)> accept;
};

// Replaces the matches that do not overlap, from last to first, where nothing else uses the results of the
// pattern's other nodes. Returns the number of replacements. Throws ValueError for a rule that violates the
// conditions above, or whose replacement produces a tensor of another shape.
std::size_t rewrite(Graph& graph, const Rule& rule);

}  // namespace penstock::graph
