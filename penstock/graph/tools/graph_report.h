// A captured graph in words: what `penstock inspect graph` prints.
//
//   fmt::print("{}", report_text(load_graph("step.psgraph"), {.nodes = 20}));
#pragma once

#include <cstddef>
#include <string>

#include "penstock/graph/tools/graph_file.h"

namespace penstock::graph {

struct ReportOptions {
  std::size_t nodes = 20;    // rows of the node table; 0: all
  std::size_t saved = 10;    // rows of the table of saved tensors, the largest first; 0: all
};

// Counts and bytes; operators by how often they occur; inputs with what is written of them; results with what they alias; what forward saves
// for backward; nodes.
std::string report_text(const GraphFile& file, const ReportOptions& options = {});

}  // namespace penstock::graph
