// Whether two graphs draw the same random numbers and have the same effects in the same order.
// Private to this folder. Thread safety: any thread.
#pragma once

#include <string>

#include "penstock/graph.h"

namespace penstock::graph {

// Returns what differs, or an empty text.
//
// Draws from the generators of the process and side effects are one sequence: an operator with a side effect
// may seed a generator. Collectives of this library touch no generator; they are compared with the other
// effects only. Compared are operators, constants, phases, and the shapes of tensors. Where a pass has kept
// the values (as it should: a draw is a node that stays), each must also return, and be given, what it was
// before, so that two equal operators are not exchanged. Draws and effects whose state is an argument
// (state_operator.h) are compared along the chain that leads to each returned state.
std::string difference_of_effects(const Graph& before, const Graph& after);

}  // namespace penstock::graph
