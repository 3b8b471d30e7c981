// The leaves of a tree as values of a captured function, and back.
#pragma once

#include <span>
#include <vector>

#include "penstock/graph/trace/analyze.h"
#include "penstock/pytree.h"

namespace penstock::graph {

// A tensor, also an undefined one, is a tensor; anything else a TorchScript value (pytree_convert.h).
Values values_of_leaves(const std::vector<Tree>& leaves);
std::vector<Tree> leaves_of_values(std::span<const c10::IValue> values);

}  // namespace penstock::graph
