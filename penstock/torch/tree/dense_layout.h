// Tensors as the memory they occupy: how a tensor of any layout travels as one piece.
//
//   at::Tensor copy = in_layout(tensor, dense_strides(tensor.sizes(), tensor.strides()));   // no copy where it is dense
//   send(memory_of(copy));                                                                  // one row of numel() elements
//
// A layout is dense when every element has a place of its own and there is none between them: contiguous, channels-last, any
// permutation of these. Not dense: expanded dims, slices with gaps, windows that overlap. Strides of dims with one element, and of
// tensors without elements, say nothing about memory and fit any layout.
// Pure functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "penstock/torch/tree/tensor_meta.h"

namespace penstock {

bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides);

// The strides themselves where they are dense. Else dense ones in the same order of dims: those that clone() would give.
std::vector<std::int64_t> dense_strides(at::IntArrayRef sizes, at::IntArrayRef strides);

// Whether both put every element at the same place of the memory.
bool same_layout(at::IntArrayRef sizes, at::IntArrayRef strides, at::IntArrayRef others);

// The tensor with these dense strides: itself where it has this layout, else a copy. Conjugation and negation that are pending are
// carried out. No graph leads to a copy.
at::Tensor in_layout(const at::Tensor& tensor, at::IntArrayRef strides);

// All elements of a dense tensor in the order of its memory, as one dim where it is not contiguous. Shares the memory. Throws
// ValueError for a tensor that is not dense.
at::Tensor memory_of(const at::Tensor& dense);

// The record with dense_strides; of a distributed one those of the local part. What is said about the whole stays.
TensorMeta dense_meta(const TensorMeta& meta);
// The same, with contiguous strides where these fit the layout: equal for records that mean the same memory.
TensorMeta comparable_meta(const TensorMeta& meta);

}  // namespace penstock
