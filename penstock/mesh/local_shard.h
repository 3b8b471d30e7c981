// Computes which part of a tensor a rank of a mesh holds: shape, offset and index ranges from placements.
//
//   local_shape_and_offset({5, 3}, {2, 2}, {1, 0}, {Shard{0}, Shard{1}});   // shape (2, 2), offset (3, 0)
//
// Splitting n indices over p ranks assigns ceil(n / p) of them to each rank in order, until none are left: 5
// rows over 4 ranks are 2, 2, 1, 0. Several axes may split one dim: the left axis splits first, the next one
// splits the resulting part, and so on.
//
// A StridedShard is to the left of axes that split before it. Its position in the order of splits follows
// from its split factor: the number of pieces made by the axes that split before it. [_S(0, 2), S(0)] on dp=3
// x tp=2 splits 7 rows by tp into 0-3 and 4-6, and each piece by dp: 0-1, 2-3, nothing, and 4, 5, 6. These
// are the shards of a tensor-parallel parameter that is sharded over data-parallel ranks, even if the sizes
// do not divide evenly. A split factor that is not the product of axes to the right is taken literally: that
// many pieces, each split over the axis, and a rank holds its part of every piece, so its indices form
// several ranges. Indices are always held in ascending order.
//
// Replicate and Partial do not change the shape. Dims may be negative. Errors are ValueError.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/device_mesh.h"
#include "penstock/placement.h"

namespace penstock {

// The indices offset, offset + 1, ... offset + length - 1 of a dim.
struct Segment {
  std::int64_t offset = 0;
  std::int64_t length = 0;
  friend bool operator==(const Segment&, const Segment&) = default;
};

// One segment per part; empty ones have offset dim_size.
std::vector<Segment> split_sizes_and_offsets(std::int64_t dim_size, int parts);

struct LocalShard {
  std::vector<std::int64_t> shape;
  // Position of the first element in the whole tensor; for a dim of which nothing is held, the size of the
  // dim.
  std::vector<std::int64_t> offset;
  friend bool operator==(const LocalShard&, const LocalShard&) = default;
};

// A piece of the whole tensor and its position in the local tensor.
struct ShardBox {
  std::vector<std::int64_t> offset;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> local_offset;
  friend bool operator==(const ShardBox&, const ShardBox&) = default;
};

LocalShard local_shape_and_offset(const std::vector<std::int64_t>& global_shape,
                                  const std::vector<std::int64_t>& mesh_shape,
                                  const std::vector<std::int64_t>& coordinate, const Placements& placements);

// Per dim, the indices held, in the order of the local tensor. No segment is empty; adjacent ones are merged.
std::vector<std::vector<Segment>> local_segments(const std::vector<std::int64_t>& global_shape,
                                                 const std::vector<std::int64_t>& mesh_shape,
                                                 const std::vector<std::int64_t>& coordinate,
                                                 const Placements& placements);

// The same as boxes: every combination of segments, the last dim varying fastest. Empty for a rank that holds
// nothing; one box unless a strided shard holds several ranges.
std::vector<ShardBox> local_boxes(const std::vector<std::int64_t>& global_shape,
                                  const std::vector<std::int64_t>& mesh_shape,
                                  const std::vector<std::int64_t>& coordinate, const Placements& placements);

// For this rank of the mesh. A rank outside the mesh holds nothing: shape (0), no offset, no boxes.
LocalShard local_shape_and_offset(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh,
                                  const Placements& placements);
std::vector<ShardBox> local_boxes(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh,
                                  const Placements& placements);

}  // namespace penstock
