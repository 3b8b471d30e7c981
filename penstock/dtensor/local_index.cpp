#include "penstock/dtensor/local_index.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "penstock/base/errors.h"
#include "penstock/mesh/local_shard.h"

namespace penstock::detail {
namespace {

void check_range(const ShardingCall& call, const at::Tensor& index, std::int64_t size) {
  if (index.numel() == 0) return;
  const at::Tensor fine = index.lt(size).logical_and_(index.ge(-size)).all();
  if (!index.is_cpu()) {
    at::_assert_async(fine);
    return;
  }
  if (!fine.item<bool>())
    throw ValueError(describe(fmt::format("{}: index", call.traits.name), fmt::format("values from {} to {}", index.min().item<std::int64_t>(), index.max().item<std::int64_t>()),
                              fmt::format("values from {} to {}, for a dim of size {}", -size, size - 1, size), "check what the indices are computed from"));
}

}  // namespace

at::Tensor LocalIndex::position_or(std::int64_t other) const { return position.masked_fill(held.logical_not(), other); }

LocalIndex local_index(const ShardingCall& call, const at::Tensor& index, const std::vector<std::int64_t>& shape, const Placements& placements,
                       std::int64_t dim) {
  const std::int64_t size = shape[static_cast<std::size_t>(dim)];
  check_range(call, index, size);
  const std::vector<Segment> segments = local_segments(shape, call.mesh_shape, call.coordinate, placements)[static_cast<std::size_t>(dim)];
  const at::Tensor from_front = at::where(index.lt(0), index + size, index);
  LocalIndex result;
  for (const Segment& segment : segments) {
    const at::Tensor position = from_front - segment.offset;
    const at::Tensor here = position.ge(0).logical_and_(position.lt(segment.length));
    result.position = result.held.defined() ? at::where(here, position + result.length, result.position) : position;
    result.held = result.held.defined() ? result.held.logical_or(here) : here;
    result.length += segment.length;
  }
  if (!result.held.defined()) {
    result.position = at::zeros_like(index);
    result.held = at::zeros_like(index, index.options().dtype(at::kBool));
  }
  return result;
}

}  // namespace penstock::detail
