#include "penstock/dtensor/tensor/local_index.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"

namespace penstock::detail {
namespace {

void check_range(const ShardingCall& call, const at::Tensor& index, std::int64_t size) {
  if (index.numel() == 0) return;
  const at::Tensor fine = index.lt(size).logical_and_(index.ge(-size)).all();
  // The values of a captured tensor are checked when the graph runs.
  if (!index.is_cpu() || is_fake(index)) {
    at::_assert_async(fine);
    return;
  }
  if (!fine.item<bool>())
    throw ValueError(
        describe(fmt::format("{}: index", call.traits.name),
                 fmt::format("values from {} to {}", index.min().item<std::int64_t>(),
                             index.max().item<std::int64_t>()),
                 fmt::format("values from {} to {}, for a dim of size {}", -size, size - 1, size),
                 "check what the indices are computed from"));
}

}  // namespace

at::Tensor LocalIndex::position_or(std::int64_t other) const {
  return position.masked_fill(held.logical_not(), other);
}

LocalIndex find_held(const at::Tensor& indices, const std::vector<Segment>& segments) {
  const at::Tensor wide = indices.to(at::kLong);
  LocalIndex found{at::zeros_like(wide), at::zeros_like(wide, wide.options().dtype(at::kBool)), 0};
  for (const Segment& segment : segments) {
    const at::Tensor here = wide.ge(segment.offset).logical_and_(wide.lt(segment.offset + segment.length));
    found.position = at::where(here, wide - (segment.offset - found.length), found.position);
    found.held.logical_or_(here);
    found.length += segment.length;
  }
  return found;
}

LocalIndex local_index(const ShardingCall& call, const at::Tensor& index,
                       const std::vector<std::int64_t>& shape, const Placements& placements,
                       std::int64_t dim) {
  const std::int64_t size = shape[static_cast<std::size_t>(dim)];
  check_range(call, index, size);
  const auto segments = local_segments(shape, call.mesh_shape, call.coordinate, placements);
  return find_held(at::where(index.lt(0), index + size, index), segments[static_cast<std::size_t>(dim)]);
}

}  // namespace penstock::detail
