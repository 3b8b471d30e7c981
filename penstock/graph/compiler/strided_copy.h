// Copies of dense tensors into contiguous memory.
// Private to this folder. Thread safety: any thread.
#pragma once

#include <ATen/ATen.h>

namespace penstock::graph {

// Copies the elements of `from`, of any dtype and strides (also 0), to `to`, which has room for them, in
// row-major order. Returns false and does nothing where LibTorch's copy is faster: large transposes, and what
// it divides among threads.
bool copy_to_contiguous(const at::Tensor& from, at::IntArrayRef sizes, at::IntArrayRef strides, void* to);

}  // namespace penstock::graph
