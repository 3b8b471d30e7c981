// Fake inputs for a capture that autograd takes for results of an earlier computation.
#pragma once

#include <ATen/ATen.h>

namespace penstock::graph {

// The same value as `data`, but no leaf: in-place operators are allowed on it, and what flows back to it reaches `leaf`, a leaf that needs a
// gradient, of the same shape (or `data` itself). No operator is called.
at::Tensor non_leaf_of(const at::Tensor& leaf, const at::Tensor& data);

}  // namespace penstock::graph
