// A text report of a captured graph, as printed by `penstock inspect graph`.
//
//   fmt::print("{}", report_text(load_graph("step.psgraph"), {.nodes = 20}));
#pragma once

#include <cstddef>
#include <string>

#include "penstock/graph/tools/graph_file.h"

namespace penstock::graph {

struct ReportOptions {
  std::size_t nodes = 20;  // rows of the node table; 0 for all
  std::size_t saved = 10;  // rows of the table of saved tensors, largest first; 0 for all
};

// Contains counts and bytes; operators by frequency; inputs and how they are mutated; results and what they
// alias; the tensors forward saves for backward; nodes.
std::string report_text(const GraphFile& file, const ReportOptions& options = {});

}  // namespace penstock::graph
