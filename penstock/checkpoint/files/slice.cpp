#include "penstock/checkpoint/files/slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

namespace penstock::checkpoint {

namespace {

using Numbers = std::vector<std::int64_t>;

std::int64_t volume(const Numbers& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

bool within(const Numbers& offset, const Numbers& shape, const Numbers& whole) {
  for (std::size_t dim = 0; dim < whole.size(); ++dim)
    if (offset[dim] < 0 || shape[dim] < 1 || offset[dim] > whole[dim] ||
        shape[dim] > whole[dim] - offset[dim])
      return false;
  return true;
}

bool disjoint(const Numbers& a, const Numbers& a_shape, const Numbers& b, const Numbers& b_shape) {
  for (std::size_t dim = 0; dim < a.size(); ++dim)
    if (a[dim] >= b[dim] + b_shape[dim] || b[dim] >= a[dim] + a_shape[dim]) return true;
  return false;
}

Numbers row_major(const Numbers& shape) {
  Numbers stride(shape.size(), 1);
  for (std::size_t dim = shape.size(); dim-- > 1;) stride[dim - 1] = stride[dim] * shape[dim];
  return stride;
}

}  // namespace

Slice Slice::whole(const Numbers& shape) {
  Slice slice{shape, shape, {}};
  if (std::find(shape.begin(), shape.end(), 0) == shape.end())
    slice.boxes.push_back({Numbers(shape.size(), 0), shape, Numbers(shape.size(), 0)});
  return slice;
}

std::int64_t Slice::held() const {
  std::int64_t count = 0;
  for (const ShardBox& box : boxes) count += volume(box.shape);
  return count;
}

std::string validation_error(const Slice& slice) {
  const std::size_t dims = slice.global_shape.size();
  for (const std::int64_t size : slice.global_shape)
    if (size < 0) return "a negative size";
  if (slice.boxes.empty()) return "";
  if (slice.local_shape.size() != dims)
    return fmt::format("{} local dims but {} global dims", slice.local_shape.size(), dims);
  for (const ShardBox& box : slice.boxes) {
    if (box.offset.size() != dims || box.shape.size() != dims || box.local_offset.size() != dims)
      return "a box with a different number of dims";
    if (!within(box.offset, box.shape, slice.global_shape)) return "a box outside of the whole tensor";
    if (!within(box.local_offset, box.shape, slice.local_shape)) return "a box outside of the local tensor";
  }
  for (std::size_t i = 0; i < slice.boxes.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) {
      const ShardBox &a = slice.boxes[i], &b = slice.boxes[j];
      if (!disjoint(a.local_offset, a.shape, b.local_offset, b.shape) || overlap(a, b))
        return "boxes that overlap";
    }
  if (slice.held() != volume(slice.local_shape)) return "boxes that do not fill the local tensor";
  return "";
}

void for_each_run(const Slice& slice, std::uint64_t item_bytes, const std::function<void(ByteRun)>& call) {
  const std::size_t dims = slice.global_shape.size();
  const Numbers global_stride = row_major(slice.global_shape), local_stride = row_major(slice.local_shape);
  for (const ShardBox& box : slice.boxes) {
    // The innermost dims that are whole in both tensors form one run, together with the extent of the box in
    // the next dim.
    std::size_t outer = dims == 0 ? 0 : dims - 1;
    std::int64_t length = dims == 0 ? 1 : box.shape[outer];
    while (outer > 0 && box.shape[outer] == slice.global_shape[outer] &&
           box.shape[outer] == slice.local_shape[outer])
      length *= box.shape[--outer];
    Numbers index(outer, 0);
    std::int64_t global = 0, local = 0;
    for (std::size_t dim = 0; dim < dims; ++dim) {
      global += box.offset[dim] * global_stride[dim];
      local += box.local_offset[dim] * local_stride[dim];
    }
    for (;;) {
      call({static_cast<std::uint64_t>(global) * item_bytes, static_cast<std::uint64_t>(local) * item_bytes,
            static_cast<std::uint64_t>(length) * item_bytes});
      std::size_t dim = outer;
      while (dim-- > 0) {
        global += global_stride[dim];
        local += local_stride[dim];
        if (++index[dim] < box.shape[dim]) break;
        global -= index[dim] * global_stride[dim];
        local -= index[dim] * local_stride[dim];
        index[dim] = 0;
      }
      if (dim == static_cast<std::size_t>(-1)) break;
    }
  }
}

bool overlap(const ShardBox& a, const ShardBox& b) { return !disjoint(a.offset, a.shape, b.offset, b.shape); }

}  // namespace penstock::checkpoint
