// Copies between a whole tensor and the rows of a collective's buffer, one row per rank.
//
//   rows      [ranks, width] of the parameter's dtype; a parameter's piece is stored densely at `offset` of
//   each row
//   gather    rows -> whole, after an all-gather
//   reduce    whole -> rows, before a reduce-scatter; dtype may differ, padding becomes zero
//
// Both make one pass over the data for any dim, with at most two copies (the full pieces, and the short one).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "penstock/shard/layout/shard_layout.h"

namespace penstock {

// `whole`: of the layout's shape, dense. `rows`: contiguous.
void join_pieces(const at::Tensor& rows, std::int64_t offset, const ShardLayout& layout,
                 const at::Tensor& whole);
void split_pieces(const at::Tensor& whole, const ShardLayout& layout, const at::Tensor& rows,
                  std::int64_t offset);

// Returns one rank's piece as a view.
at::Tensor piece_of(const at::Tensor& whole, const ShardLayout& layout, int rank);

// `bytes` is a contiguous byte tensor. Returns a tensor of another dtype over a part of it.
at::Tensor typed_part(const at::Tensor& bytes, std::int64_t byte_offset, at::ScalarType dtype,
                      at::IntArrayRef shape);

}  // namespace penstock
