// Positions in a dim of which this rank holds a part. Private to this folder.
//
//   // rows 2 and 3 of 5 are here
//   local_index(call, "gather", tensor([0, 2, 3]), shape, {Shard{0}}, 0)   // position [0, 0, 1], held [false, true, true]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "penstock/dtensor/tensor/sharding_rule.h"
#include "penstock/mesh/local_shard.h"

namespace penstock::detail {

struct LocalIndex {
  at::Tensor position;      // in the local part, int64; 0 where it is not held
  at::Tensor held;          // bool
  std::int64_t length = 0;  // of the dim here

  // Where it is not held, `other`.
  at::Tensor position_or(std::int64_t other) const;
};

// Indices of a dim of which this rank holds `segments`. What lies outside of the dim is not held.
LocalIndex find_held(const at::Tensor& indices, const std::vector<Segment>& segments);

// `index` counts in dim `dim` of a tensor of `shape` that is laid out as `placements` say; negative values count from the end.
// Throws ValueError for one out of range (on CUDA the kernel stops, as LibTorch's own do).
LocalIndex local_index(const ShardingCall& call, const at::Tensor& index, const std::vector<std::int64_t>& shape, const Placements& placements,
                       std::int64_t dim);

}  // namespace penstock::detail
