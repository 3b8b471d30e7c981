// Nodes of a graph as one loop kernel (codegen/loop_kernel.h).
//
//   const auto loops = loops_of(graph, nodes, needed, {});
//   if (loops) emit_cpp({{"k0", loops->kernel}});
//
// Nodes are pointwise operators with broadcasting, casts, copies, factories of one number, reductions over
// dims, softmax and its like, and views of what the group computes. How their dims correspond follows from
// the operators (codegen/index_space.h).
// Private to this folder. Thread safety: any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/codegen/loop_kernel.h"
#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct LoweringOptions {
  // Only operators whose generated result has the bits of the operator's. Each result in a narrow type is
  // rounded, as the operators round theirs; otherwise only what is stored and what is cast.
  bool exact = false;
};

// A tensor that a kernel reads or writes.
struct GroupTensor {
  ValueId value = kNoValue;
  std::size_t buffer = 0;
};

struct GroupLoops {
  LoopKernel kernel;
  std::vector<GroupTensor> inputs;   // in the order of the buffers, which begin with them
  std::vector<GroupTensor> outputs;  // the buffers behind those
};

// What an operator is to a kernel.
enum class NodeKind : std::uint8_t {
  Unknown,  // stays an operator
  View,     // a view; part of a group only if its base is computed there
  Compute
};
NodeKind kind_of(const Graph& graph, const Node& node, const LoweringOptions& options);

// `nodes`: indices in graph.nodes, in order. `needed`: the values they compute that others use; each is
// written. Returns std::nullopt if they are not one loop kernel.
std::optional<GroupLoops> loops_of(const Graph& graph, const std::vector<std::size_t>& nodes,
                                   const std::vector<ValueId>& needed, const LoweringOptions& options);

}  // namespace penstock::graph
