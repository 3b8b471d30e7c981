// Which nodes of a graph become kernels.
//
//   const FusionPlan plan = plan_fusion(graph, {});
//   for (const FusedGroup& group : plan.groups) std::cout << group.operators << "\n";   // "aten::mul,
//   aten::relu"
//
// Groups grow along the values: an operator joins those that compute its arguments if all of them are one
// loop kernel (group_loops.h) and nothing outside of the group lies between them. Groups that read the same
// tensors are then joined. A sum over leading dims computes its cheap arguments again where another kernel
// has them already, instead of having them stored. A group is used if it saves a call at least and its loops
// do not go through memory with large steps.
// Private to this folder. Thread safety: any thread.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "penstock/graph/fused/group_loops.h"
#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct FusionOptions {
  LoweringOptions lowering = {};
  // Also groups that save nothing: single operators, and loops with large steps.
  bool everything = false;
};

struct FusedGroup {
  std::vector<std::size_t> nodes;  // that the kernel computes, in order
  std::vector<std::size_t> owned;  // of them, those that no other group computes; views stay nodes
  std::vector<ValueId> inputs, outputs;
  LoopKernel kernel;      // its buffers are inputs and outputs
  std::string operators;  // names, for reports
  c10::Device device = at::kCPU;
};

struct FusionPlan {
  std::vector<FusedGroup> groups;
};

FusionPlan plan_fusion(const Graph& graph, const FusionOptions& options);

// The graph with a node in place of each group. `call`: makes that of group i, with these inputs and results.
// Nodes are in an order in which the values are known; draws of random numbers and side effects keep theirs.
Graph with_groups(const Graph& graph, const FusionPlan& plan,
                  const std::function<Node(std::size_t group, Operand inputs, Operand outputs)>& call);

// A group as a graph of its own, from its inputs to its outputs.
Graph graph_of_group(const Graph& graph, const FusedGroup& group);

}  // namespace penstock::graph
