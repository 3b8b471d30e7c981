// Shards of random tensors on random meshes, against a simulation that splits explicit lists of indices.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <numeric>

#include "penstock/mesh/local_shard.h"
#include "penstock/mesh_layout.h"
#include "tests/mesh/generate.h"

namespace penstock {
namespace local_shard_property_test {

using test::number;
using test::random_shape;
using Numbers = std::vector<std::int64_t>;

Numbers iota(std::int64_t n) {
  Numbers list(static_cast<std::size_t>(n));
  std::iota(list.begin(), list.end(), 0);
  return list;
}

Numbers chunk(const Numbers& list, std::int64_t parts, std::int64_t part) {
  const auto n = static_cast<std::int64_t>(list.size());
  const std::int64_t step = (n + parts - 1) / parts;
  const std::int64_t begin = std::min(n, part * step), end = std::min(n, begin + step);
  return Numbers(list.begin() + begin, list.begin() + end);
}

Numbers strided(const Numbers& list, std::int64_t factor, std::int64_t parts, std::int64_t part) {
  Numbers all;
  for (std::int64_t piece = 0; piece < factor; ++piece) {
    const Numbers own = chunk(chunk(list, factor, piece), parts, part);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

Numbers indices_of(const std::vector<Segment>& segments) {
  Numbers all;
  for (const Segment& segment : segments)
    for (std::int64_t i = 0; i < segment.length; ++i) all.push_back(segment.offset + i);
  return all;
}

Placement random_placement(std::int64_t ndim, bool with_strided) {
  const int kind = number(0, with_strided ? 9 : 6);
  const std::int64_t dim = number<std::int64_t>(-ndim, ndim - 1);
  if (kind == 0) return Replicate{};
  if (kind == 1) return Partial{};
  if (kind <= 6) return Shard{dim};
  return StridedShard{dim, number<std::int64_t>(1, 6)};
}

Numbers random_sizes(std::int64_t max_size) {
  Numbers shape(static_cast<std::size_t>(number(1, 3)));
  for (std::int64_t& size : shape) size = number<std::int64_t>(0, max_size);
  return shape;
}

RC_GTEST_PROP(LocalShardLaws, SplitsSumUp, ()) {
  const std::int64_t n = number<std::int64_t>(0, 50);
  const int parts = number(1, 12);
  std::int64_t next = 0;
  for (const Segment& segment : split_sizes_and_offsets(n, parts)) {
    RC_ASSERT(segment.offset == next);
    next += segment.length;
  }
  RC_ASSERT(next == n);
}

// Left axis first, on explicit lists.
RC_GTEST_PROP(LocalShardLaws, ShardsAreChunksFromLeftToRight, ()) {
  const Numbers shape = random_sizes(13);
  const MeshLayout mesh(random_shape(3, 4));
  Placements placements;
  for (int axis = 0; axis < mesh.ndim(); ++axis)
    placements.push_back(random_placement(static_cast<std::int64_t>(shape.size()), false));
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
    const Numbers coordinate = *mesh.coordinate(rank);
    const auto segments = local_segments(shape, mesh.shape(), coordinate, placements);
    const LocalShard shard = local_shape_and_offset(shape, mesh.shape(), coordinate, placements);
    for (std::size_t dim = 0; dim < shape.size(); ++dim) {
      Numbers list = iota(shape[dim]);
      for (std::size_t axis = 0; axis < placements.size(); ++axis) {
        const auto own = static_cast<std::int64_t>(dim),
                   wrapped = own - static_cast<std::int64_t>(shape.size());
        if (placements[axis].splits(own) || placements[axis].splits(wrapped))
          list = chunk(list, mesh.size(static_cast<int>(axis)), coordinate[axis]);
      }
      RC_ASSERT(indices_of(segments[dim]) == list);
      RC_ASSERT(shard.shape[dim] == static_cast<std::int64_t>(list.size()));
      RC_ASSERT(shard.offset[dim] == (list.empty() ? shape[dim] : list.front()));
    }
  }
}

// For any placements: the boxes of the ranks that share the other axes' coordinates contain every element
// once, and the pieces of a rank fill its local tensor.
RC_GTEST_PROP(LocalShardLaws, BoxesTileTheTensorOncePerReplica, ()) {
  const Numbers shape = random_sizes(6);
  const MeshLayout mesh(random_shape(3, 3));
  Placements placements;
  for (int axis = 0; axis < mesh.ndim(); ++axis)
    placements.push_back(random_placement(static_cast<std::int64_t>(shape.size()), true));
  std::int64_t replicas = 1;
  for (int axis = 0; axis < mesh.ndim(); ++axis)
    if (!placements[static_cast<std::size_t>(axis)].splits()) replicas *= mesh.size(axis);
  std::map<Numbers, std::int64_t> held;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
    const Numbers coordinate = *mesh.coordinate(rank);
    const LocalShard shard = local_shape_and_offset(shape, mesh.shape(), coordinate, placements);
    std::int64_t local_size = 1;
    for (const std::int64_t size : shard.shape) local_size *= size;
    std::map<Numbers, int> local;
    for (const ShardBox& box : local_boxes(shape, mesh.shape(), coordinate, placements)) {
      const MeshLayout inside(box.shape);
      for (std::int64_t i = 0; i < inside.size(); ++i) {
        Numbers global = *inside.coordinate(i), own = global;
        for (std::size_t dim = 0; dim < shape.size(); ++dim) {
          global[dim] += box.offset[dim];
          own[dim] += box.local_offset[dim];
          RC_ASSERT(own[dim] < shard.shape[dim]);
        }
        ++held[global];
        ++local[own];
      }
    }
    RC_ASSERT(static_cast<std::int64_t>(local.size()) == local_size);
    for (const auto& [place, times] : local) RC_ASSERT(times == 1);
  }
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) elements *= size;
  RC_ASSERT(static_cast<std::int64_t>(held.size()) == elements);
  for (const auto& [place, times] : held) RC_ASSERT(times == replicas);
}

// Tensor parallel first, then sharded over dp: what a rank holds is its dp chunk of its tp chunk.
RC_GTEST_PROP(LocalShardLaws, StridedShardIsTheRightAxisFirst, ()) {
  const std::int64_t n = number<std::int64_t>(0, 60), dp = number<std::int64_t>(1, 6),
                     tp = number<std::int64_t>(1, 6);
  for (std::int64_t d = 0; d < dp; ++d)
    for (std::int64_t t = 0; t < tp; ++t) {
      const auto segments = local_segments({n}, {dp, tp}, {d, t}, {StridedShard{0, tp}, Shard{0}});
      RC_ASSERT(indices_of(segments[0]) == chunk(chunk(iota(n), tp, t), dp, d));
    }
}

// The same on three axes, where the right two split first.
RC_GTEST_PROP(LocalShardLaws, StridedShardAfterTwoAxes, ()) {
  const std::int64_t n = number<std::int64_t>(0, 60);
  const Numbers mesh = {number<std::int64_t>(1, 4), number<std::int64_t>(1, 4), number<std::int64_t>(1, 4)};
  const MeshLayout layout(mesh);
  for (std::int64_t rank = 0; rank < layout.size(); ++rank) {
    const Numbers c = *layout.coordinate(rank);
    const Numbers plain =
        indices_of(local_segments({n}, mesh, c, {StridedShard{0, mesh[1] * mesh[2]}, Shard{0}, Shard{0}})[0]);
    RC_ASSERT(plain == chunk(chunk(chunk(iota(n), mesh[1], c[1]), mesh[2], c[2]), mesh[0], c[0]));
    const Numbers nested = indices_of(local_segments(
        {n}, mesh, c, {StridedShard{0, mesh[1] * mesh[2]}, StridedShard{0, mesh[2]}, Shard{0}})[0]);
    RC_ASSERT(nested == chunk(chunk(chunk(iota(n), mesh[2], c[2]), mesh[1], c[1]), mesh[0], c[0]));
  }
}

// If sizes divide evenly, every strided shard equals the literal one: factor pieces, each split, applied from
// left to right.
RC_GTEST_PROP(LocalShardLaws, StridedShardIsLiteralWhereSizesDivide, ()) {
  const std::int64_t dp = number<std::int64_t>(1, 4), tp = number<std::int64_t>(1, 4),
                     factor = number<std::int64_t>(1, 6);
  const std::int64_t n = dp * tp * factor * number<std::int64_t>(1, 3);
  for (std::int64_t d = 0; d < dp; ++d)
    for (std::int64_t t = 0; t < tp; ++t) {
      const Numbers left = strided(iota(n), factor, dp, d);
      RC_ASSERT(indices_of(local_segments({n}, {dp, tp}, {d, t}, {StridedShard{0, factor}, Shard{0}})[0]) ==
                chunk(left, tp, t));
      RC_ASSERT(indices_of(local_segments({n}, {dp, tp}, {d, t},
                                          {StridedShard{0, factor}, Replicate{}})[0]) == left);
    }
}

// A strided shard that is alone on its dim equals the literal one for any size.
RC_GTEST_PROP(LocalShardLaws, StridedShardAlone, ()) {
  const std::int64_t n = number<std::int64_t>(0, 40), parts = number<std::int64_t>(1, 6),
                     factor = number<std::int64_t>(2, 7);
  for (std::int64_t part = 0; part < parts; ++part)
    RC_ASSERT(indices_of(local_segments({n}, {parts}, {part}, {StridedShard{0, factor}})[0]) ==
              strided(iota(n), factor, parts, part));
}

}  // namespace local_shard_property_test
}  // namespace penstock
