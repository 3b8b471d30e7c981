// Treats tensors as blocks of memory, so that a tensor of any dense layout can be sent as one piece.
//
//   // no copy if it is dense
//   at::Tensor copy = in_layout(tensor, dense_strides(tensor.sizes(), tensor.strides()));
//   send(memory_of(copy));  // one row of numel() elements
//
// A layout is dense if every element has its own memory location and there are no gaps between them:
// contiguous, channels-last, and any permutation of these. Not dense: expanded dims, slices with gaps,
// overlapping windows. Strides of dims with one element, and of tensors without elements, do not affect
// memory and match any layout. Pure functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "penstock/torch/tree/tensor_meta.h"

namespace penstock {

bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides);

// Returns the strides themselves if they are dense, otherwise dense ones in the same order of dims, as
// clone() would produce.
std::vector<std::int64_t> dense_strides(at::IntArrayRef sizes, at::IntArrayRef strides);

// Returns whether both put every element at the same memory location.
bool same_layout(at::IntArrayRef sizes, at::IntArrayRef strides, at::IntArrayRef others);

// Returns the tensor itself if it has these dense strides, otherwise a copy that has them. Resolves pending
// conjugation and negation. A copy is not connected to the autograd graph.
at::Tensor in_layout(const at::Tensor& tensor, at::IntArrayRef strides);

// Returns all elements of a dense tensor in memory order, as one dim if it is not contiguous. Shares the
// memory. Throws ValueError for a tensor that is not dense.
at::Tensor memory_of(const at::Tensor& dense);

// Returns the record with dense_strides; for a distributed record, those of the local part. The global shape
// and stride are unchanged.
TensorMeta dense_meta(const TensorMeta& meta);
// The same, but with contiguous strides if they match the layout, so that records of the same memory compare
// equal.
TensorMeta comparable_meta(const TensorMeta& meta);

}  // namespace penstock
