// Fake inputs for a capture that autograd takes for results of an earlier computation.
#pragma once

#include <ATen/ATen.h>

namespace penstock::graph {

// The same value as `leaf`, a leaf that needs a gradient, but no leaf itself: in-place operators are allowed on it, and what
// flows back to it reaches `leaf`. No operator is called.
at::Tensor non_leaf_of(const at::Tensor& leaf);

}  // namespace penstock::graph
