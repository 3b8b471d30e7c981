// What the passes do to a captured graph, as a table: `penstock inspect graph --passes`.
//
//   PassedGraph passed = with_passes(file.joint, PassList(), {.static_inputs = 40});
//   fmt::print("{}", passed.text);
#pragma once

#include <cstddef>
#include <string>

#include "penstock/compile_options.h"
#include "penstock/graph/passes/pass_list.h"
#include "penstock/graph/trace/capture.h"

namespace penstock::graph {

// What a graph costs, as far as it follows from shapes.
struct GraphCost {
  std::size_t nodes = 0;
  // Of a joint graph: what forward saves for backward, each memory once, inputs and constants not counted.
  std::size_t saved_bytes = 0;
  // Read and written by operators that are no views: an estimate of the traffic to memory, without caches.
  std::size_t moved_bytes = 0;
};
GraphCost cost_of(const JointGraph& joint, Partitioner partitioner);

struct PassReportOptions {
  std::size_t static_inputs = 0;  // parameters and buffers, the first inputs
  Partitioner partitioner = Partitioner::Default;
};
struct PassedGraph {
  JointGraph joint;  // after the passes on the joint graph
  std::string text;  // a row for each pass and graph, then before and after
};
// Runs the passes as a capture would: on the joint graph, and on its halves or, without a backward, on it
// alone.
PassedGraph with_passes(JointGraph joint, const PassList& passes, const PassReportOptions& options = {});

}  // namespace penstock::graph
