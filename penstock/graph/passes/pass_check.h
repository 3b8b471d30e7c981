// What must be true of a graph after a pass.
// Thread safety: any thread.
#pragma once

#include <string_view>

#include "penstock/graph.h"

namespace penstock::graph {

// Throws InvariantError, which names the pass, unless `after` is a well-formed graph without writes that has
// the same inputs and outputs as `before`, in the same memory, and draws the same random numbers and has the
// same side effects in one and the same order (effect_check.h). If its sizes are fixed,
// every result must also have the shape and dtype that its operator gives it (not checked for operators on
// tensors that begin inside of their memory).
void check_pass(const Graph& before, const Graph& after, std::string_view pass);

}  // namespace penstock::graph
