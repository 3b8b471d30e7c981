// Which operators cost no more than one pass over memory. Private to this folder.
// Thread safety: any thread.
#pragma once

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// Pointwise operators, reductions and factories: not more expensive than reading their result from memory.
// Views, which cost nothing, are not among them (memory_groups.h, only_views), except `_unsafe_view`.
bool is_cheap(const Node& node);

}  // namespace penstock::graph
