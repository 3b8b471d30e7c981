// Maps global indices of a dim to positions in this rank's part of it. Private to this folder.
//
//   // rows 2 and 3 of 5 are here
//   // position [0, 0, 1], held [false, true, true]
//   local_index(call, "gather", tensor([0, 2, 3]), shape, {Shard{0}}, 0)
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "penstock/mesh/local_shard.h"
#include "penstock/sharding_rule.h"

namespace penstock::detail {

struct LocalIndex {
  at::Tensor position;      // in the local part, int64; 0 if not held
  at::Tensor held;          // bool
  std::int64_t length = 0;  // of the local dim

  // `other` where the index is not held.
  at::Tensor position_or(std::int64_t other) const;
};

// Indices of a dim of which this rank holds `segments`. Indices outside of the dim are not held.
LocalIndex find_held(const at::Tensor& indices, const std::vector<Segment>& segments);

// `index` holds indices of dim `dim` of a tensor of `shape` placed as `placements`; negative values count
// from the end. Throws ValueError for an index out of range (on CUDA a device-side assertion fails, as in
// LibTorch).
LocalIndex local_index(const ShardingCall& call, const at::Tensor& index,
                       const std::vector<std::int64_t>& shape, const Placements& placements,
                       std::int64_t dim);

}  // namespace penstock::detail
