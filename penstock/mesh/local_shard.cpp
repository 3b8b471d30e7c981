#include "penstock/mesh/local_shard.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

using Numbers = std::vector<std::int64_t>;
using Segments = std::vector<Segment>;

// The part of n indices assigned to one of `parts` ranks.
Segment part_of(std::int64_t n, std::int64_t parts, std::int64_t part) {
  const std::int64_t step = n / parts + (n % parts == 0 ? 0 : 1);
  if (n == 0 || part > (n - 1) / step) return {n, 0};
  return {part * step, std::min(step, n - part * step)};
}

std::int64_t length_of(const Segments& segments) {
  std::int64_t length = 0;
  for (const Segment& segment : segments) length += segment.length;
  return length;
}

void append(Segments& segments, Segment next) {
  if (next.length == 0) return;
  if (!segments.empty() && segments.back().offset + segments.back().length == next.offset)
    segments.back().length += next.length;
  else
    segments.push_back(next);
}

// The indices at positions [window.offset, window.offset + window.length) of a list of segments.
Segments select(const Segments& segments, Segment window) {
  Segments chosen;
  std::int64_t position = 0;
  for (const Segment& segment : segments) {
    const std::int64_t begin = std::max(position, window.offset);
    const std::int64_t end = std::min(position + segment.length, window.offset + window.length);
    if (begin < end) append(chosen, {segment.offset + begin - position, end - begin});
    position += segment.length;
  }
  return chosen;
}

// One split of a dim, in the order in which splits apply.
struct AxisSplit {
  std::int64_t parts = 1;   // size of the mesh axis
  std::int64_t part = 0;    // this rank's coordinate on it
  std::int64_t pieces = 1;  // above 1: a literal strided shard, which splits each of this many pieces
};

// Visits the axes from right to left: a shard applies before the axes to its right, a strided shard after the
// axes that make as many pieces as its split factor.
std::vector<AxisSplit> splits_of(std::int64_t dim, const Numbers& mesh_shape, const Numbers& coordinate,
                                 const Placements& placements) {
  std::vector<AxisSplit> order;
  for (std::size_t axis = placements.size(); axis-- > 0;) {
    if (!placements[axis].splits(dim)) continue;
    AxisSplit split{mesh_shape[axis], coordinate[axis]};
    auto place = order.begin();
    if (placements[axis].is_strided_shard()) {
      const std::int64_t wanted = placements[axis].split_factor();
      std::int64_t pieces = 1;
      while (pieces < wanted && place != order.end() && place->pieces == 1 &&
             !__builtin_mul_overflow(pieces, place->parts, &pieces))
        ++place;
      if (pieces != wanted) {
        split.pieces = wanted;
        place = order.begin();
      }
    }
    order.insert(place, split);
  }
  return order;
}

Segments take_part(const Segments& held, const AxisSplit& split) {
  const std::int64_t length = length_of(held);
  if (split.pieces == 1) return select(held, part_of(length, split.parts, split.part));
  Segments chosen;
  // Pieces beyond the length are empty; a split factor may be far larger than the dim.
  for (std::int64_t piece = 0; piece < std::min(split.pieces, length); ++piece) {
    const Segment whole = part_of(length, split.pieces, piece);
    const Segment own = part_of(whole.length, split.parts, split.part);
    for (const Segment& segment : select(held, {whole.offset + own.offset, own.length}))
      append(chosen, segment);
  }
  return chosen;
}

Placements checked(const Numbers& global_shape, const Numbers& mesh_shape, const Numbers& coordinate,
                   const Placements& placements) {
  for (const std::int64_t size : global_shape)
    if (size < 0)
      throw ValueError(
          describe("tensor shape", fmt::format("a dim of size {}", size), "sizes of at least 0"));
  if (coordinate.size() != mesh_shape.size())
    throw ValueError(describe("mesh coordinate", fmt::format("{} numbers", coordinate.size()),
                              fmt::format("{}, one per axis", mesh_shape.size())));
  for (std::size_t axis = 0; axis < mesh_shape.size(); ++axis)
    if (mesh_shape[axis] < 1 || coordinate[axis] < 0 || coordinate[axis] >= mesh_shape[axis])
      throw ValueError(
          describe("mesh coordinate",
                   fmt::format("{} on axis {} of size {}", coordinate[axis], axis, mesh_shape[axis]),
                   "a position below the axis's size"));
  return normalize_placements(placements, static_cast<int>(mesh_shape.size()),
                              static_cast<std::int64_t>(global_shape.size()));
}

}  // namespace

std::vector<Segment> split_sizes_and_offsets(std::int64_t dim_size, int parts) {
  if (dim_size < 0 || parts < 1)
    throw ValueError(describe("split of a dim", fmt::format("{} indices over {} parts", dim_size, parts),
                              "at least 0 indices and 1 part"));
  std::vector<Segment> all;
  for (int part = 0; part < parts; ++part) all.push_back(part_of(dim_size, parts, part));
  return all;
}

std::vector<std::vector<Segment>> local_segments(const Numbers& global_shape, const Numbers& mesh_shape,
                                                 const Numbers& coordinate, const Placements& placements) {
  const Placements normalized = checked(global_shape, mesh_shape, coordinate, placements);
  std::vector<Segments> dims;
  for (std::size_t dim = 0; dim < global_shape.size(); ++dim) {
    Segments held;
    append(held, {0, global_shape[dim]});
    for (const AxisSplit& split :
         splits_of(static_cast<std::int64_t>(dim), mesh_shape, coordinate, normalized))
      held = take_part(held, split);
    dims.push_back(std::move(held));
  }
  return dims;
}

LocalShard local_shape_and_offset(const Numbers& global_shape, const Numbers& mesh_shape,
                                  const Numbers& coordinate, const Placements& placements) {
  LocalShard shard;
  const std::vector<Segments> dims = local_segments(global_shape, mesh_shape, coordinate, placements);
  for (std::size_t dim = 0; dim < dims.size(); ++dim) {
    shard.shape.push_back(length_of(dims[dim]));
    shard.offset.push_back(dims[dim].empty() ? global_shape[dim] : dims[dim].front().offset);
  }
  return shard;
}

std::vector<ShardBox> local_boxes(const Numbers& global_shape, const Numbers& mesh_shape,
                                  const Numbers& coordinate, const Placements& placements) {
  std::vector<ShardBox> boxes = {ShardBox{}};
  for (const Segments& segments : local_segments(global_shape, mesh_shape, coordinate, placements)) {
    std::vector<ShardBox> longer;
    for (const ShardBox& box : boxes) {
      std::int64_t local_offset = 0;
      for (const Segment& segment : segments) {
        ShardBox& next = longer.emplace_back(box);
        next.offset.push_back(segment.offset);
        next.shape.push_back(segment.length);
        next.local_offset.push_back(local_offset);
        local_offset += segment.length;
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

LocalShard local_shape_and_offset(const Numbers& global_shape, const DeviceMesh& mesh,
                                  const Placements& placements) {
  const auto coordinate = mesh.coordinate();
  if (!coordinate) return {{0}, {}};
  return local_shape_and_offset(global_shape, mesh.shape(), *coordinate, placements);
}

std::vector<ShardBox> local_boxes(const Numbers& global_shape, const DeviceMesh& mesh,
                                  const Placements& placements) {
  const auto coordinate = mesh.coordinate();
  if (!coordinate) return {};
  return local_boxes(global_shape, mesh.shape(), *coordinate, placements);
}

}  // namespace penstock
