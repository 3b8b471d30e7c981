#include "penstock/shard/pieces/piece_copy.h"

#include <ATen/ATen.h>

#include <cstring>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

bool plain_bytes(const at::Tensor& rows, const ShardLayout& layout, const at::Tensor& whole) {
  return layout.outer() == 1 && rows.scalar_type() == whole.scalar_type() && rows.device().is_cpu() &&
         whole.device().is_cpu() && whole.is_contiguous();
}

// The full pieces, which come first: [pieces, outer, chunk * inner] of both sides.
struct FullPieces {
  at::Tensor in_rows, in_whole;
  int count;
};

FullPieces full_pieces(const at::Tensor& rows, std::int64_t offset, const ShardLayout& layout,
                       const at::Tensor& whole) {
  const std::int64_t chunk = layout.chunk(), block = chunk * layout.inner();
  const int count =
      chunk == 0 ? 0 : static_cast<int>((layout.numel() / (layout.outer() * layout.inner())) / chunk);
  const at::Tensor in_rows = rows.as_strided({count, layout.outer(), block}, {rows.stride(0), block, 1},
                                             rows.storage_offset() + offset);
  const at::Tensor cut = whole.contiguous().view({layout.outer(), -1}).narrow(1, 0, count * block);
  return {in_rows, cut.view({layout.outer(), count, block}).transpose(0, 1), count};
}

at::Tensor place_of(const at::Tensor& rows, std::int64_t offset, const ShardLayout& layout, int rank) {
  return rows.select(0, rank).narrow(0, offset, layout.piece_numel(rank)).view(layout.piece_shape(rank));
}

}  // namespace

at::Tensor piece_of(const at::Tensor& whole, const ShardLayout& layout, int rank) {
  return layout.shape().empty() ? whole
                                : whole.narrow(layout.dim(), layout.offset(rank), layout.length(rank));
}

void join_pieces(const at::Tensor& rows, std::int64_t offset, const ShardLayout& layout,
                 const at::Tensor& whole) {
  if (layout.numel() == 0) return;
  if (plain_bytes(rows, layout, whole)) {
    const std::size_t item = whole.element_size();
    auto* to = static_cast<char*>(whole.data_ptr());
    const auto* from = static_cast<const char*>(rows.data_ptr()) + static_cast<std::size_t>(offset) * item;
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const std::size_t bytes = static_cast<std::size_t>(layout.piece_numel(rank)) * item;
      std::memcpy(to, from + static_cast<std::size_t>(rank * rows.stride(0)) * item, bytes);
      to += bytes;
    }
    return;
  }
  PENSTOCK_INVARIANT(whole.is_contiguous(), "pieces must be joined in a dense tensor");
  const FullPieces full = full_pieces(rows, offset, layout, whole);
  if (full.count > 0) full.in_whole.copy_(full.in_rows);
  if (full.count < layout.ranks() && layout.length(full.count) > 0)
    piece_of(whole, layout, full.count).copy_(place_of(rows, offset, layout, full.count));
}

void split_pieces(const at::Tensor& whole, const ShardLayout& layout, const at::Tensor& rows,
                  std::int64_t offset) {
  if (layout.padded_numel() == 0) return;
  const std::int64_t padded = layout.padded_numel();
  if (plain_bytes(rows, layout, whole)) {
    const std::size_t item = whole.element_size();
    const auto* from = static_cast<const char*>(whole.data_ptr());
    auto* to = static_cast<char*>(rows.data_ptr()) + static_cast<std::size_t>(offset) * item;
    for (int rank = 0; rank < layout.ranks(); ++rank, to += static_cast<std::size_t>(rows.stride(0)) * item) {
      const std::size_t bytes = static_cast<std::size_t>(layout.piece_numel(rank)) * item;
      if (bytes > 0) std::memcpy(to, from, bytes);
      std::memset(to + bytes, 0, static_cast<std::size_t>(padded) * item - bytes);
      from += bytes;
    }
    return;
  }
  const FullPieces full = full_pieces(rows, offset, layout, whole);
  if (full.count > 0) full.in_rows.copy_(full.in_whole);
  for (int rank = full.count; rank < layout.ranks(); ++rank) {
    const std::int64_t numel = layout.piece_numel(rank);
    if (numel > 0) place_of(rows, offset, layout, rank).copy_(piece_of(whole, layout, rank));
    rows.select(0, rank).narrow(0, offset + numel, padded - numel).zero_();
  }
}

at::Tensor typed_part(const at::Tensor& bytes, std::int64_t byte_offset, at::ScalarType dtype,
                      at::IntArrayRef shape) {
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  PENSTOCK_INVARIANT((bytes.storage_offset() + byte_offset) % item == 0,
                     "a part of a buffer must begin at a multiple of its item size");
  at::Tensor part = at::empty({0}, bytes.options().dtype(dtype));
  std::vector<std::int64_t> stride(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;)
    stride[i - 1] = stride[i] * std::max<std::int64_t>(shape[i], 1);
  return part.set_(bytes.storage(), (bytes.storage_offset() + byte_offset) / item, shape, stride);
}

}  // namespace penstock
