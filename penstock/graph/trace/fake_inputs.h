// Fake inputs for a capture that autograd treats as results of an earlier computation.
#pragma once

#include <ATen/ATen.h>

namespace penstock::graph {

// Returns a non-leaf with the value of `data`: in-place operators are allowed on it, and gradients that flow
// to it reach `leaf`, a leaf of the same shape that requires a gradient (or `data` itself). No operator is
// called.
at::Tensor non_leaf_of(const at::Tensor& leaf, const at::Tensor& data);

}  // namespace penstock::graph
