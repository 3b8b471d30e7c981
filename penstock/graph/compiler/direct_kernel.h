// Operators whose work is a call of BLAS or a copy, without the operators: mm, bmm, addmm and clone of dense
// tensors on the CPU. LibTorch's operators spend much time around small products and copies, bmm even for
// each matrix of a batch. A direct kernel returns the bits that the operator returns, in a tensor of the same
// layout: products are made by the same routine with the same arguments (torch/compat/blas_gemm.h).
// Everything that differs from what it knows (dtypes, layouts that LibTorch copies first, sizes with kernels
// of their own) is left to the operator. Private to this folder. Thread safety: any thread.
#pragma once

#include "penstock/graph/compiler/run_plan.h"
#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// Null for an operator, or constants, without one.
DirectKernel direct_kernel(const Node& node);

// Whether runs in this thread may use them now.
bool direct_kernels_allowed();

}  // namespace penstock::graph
