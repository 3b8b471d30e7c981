#include "penstock/torch/kernels/block_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "penstock/torch/compat/version.h"
#include "penstock/torch/kernels/recomputed_attention.h"

namespace penstock {
namespace {

constexpr std::int64_t kQueryBlock = 512;

// [batch, groups, repeats, queries, width] of [batch, heads, queries, width].
at::Tensor in_groups(const at::Tensor& q, std::int64_t groups) {
  return q.reshape({q.size(0), groups, q.size(1) / groups, q.size(2), q.size(3)});
}

// [batch or 1, groups or 1, repeats or 1, queries, keys] of an additive bias [batch or 1, heads or 1, ...].
at::Tensor bias_in_groups(const at::Tensor& bias, std::int64_t groups) {
  return bias.size(1) == 1 ? bias.unsqueeze(2) : in_groups(bias, groups);
}

// ---- band ----

// How the tensors of a band become [n, groups, ...]: masks that are the same in all rows of the batch are
// stored once if the batch is a part of the groups.
struct BandOrder {
  bool batch_in_groups;

  // x [batch, groups, blocks, ...]
  at::Tensor operator()(const at::Tensor& x) const {
    std::vector<std::int64_t> sizes(x.sizes().begin() + 3, x.sizes().end());
    if (batch_in_groups) {
      sizes.insert(sizes.begin(), {x.size(2), x.size(0) * x.size(1)});
      return x.movedim(2, 0).reshape(sizes);
    }
    sizes.insert(sizes.begin(), {x.size(0) * x.size(2), x.size(1)});
    return x.movedim(2, 1).reshape(sizes);
  }
  // The inverse: x [n, groups, ...] as [batch, groups, blocks, ...].
  at::Tensor back(const at::Tensor& x, std::int64_t batch, std::int64_t groups, std::int64_t blocks) const {
    std::vector<std::int64_t> sizes(x.sizes().begin() + 2, x.sizes().end());
    if (batch_in_groups) {
      sizes.insert(sizes.begin(), {blocks, batch, groups});
      return x.reshape(sizes).movedim(0, 2);
    }
    sizes.insert(sizes.begin(), {batch, blocks, groups});
    return x.reshape(sizes).movedim(1, 2);
  }
};

// x [batch, groups, keys, width] as [batch, groups, blocks, span, width] with the keys of each block; keys
// before the first are zero.
at::Tensor keys_of_blocks(const at::Tensor& x, const BandLayout& band, std::int64_t queries,
                          const BandOrder& order) {
  const std::int64_t before = x.size(2) - queries;
  const at::Tensor padded = at::constant_pad_nd(x, {0, 0, band.back - before, band.rows() - queries});
  const at::Tensor blocks =
      padded.view({x.size(0), x.size(1), band.blocks + band.back / band.block, band.block, x.size(3)});
  // Ordered first, so that joining the blocks is the only copy.
  const auto part = [&](std::int64_t first) {
    const at::Tensor some = blocks.narrow(2, first, band.blocks);
    return order.batch_in_groups ? some.movedim(2, 0) : some.movedim(2, 1);
  };
  std::vector<at::Tensor> parts;
  for (std::int64_t first = 0; first * band.block <= band.back; ++first) parts.push_back(part(first));
  const at::Tensor joined = at::cat(parts, 3);  // [blocks and batch, in some order, groups, span, width]
  return order.batch_in_groups ? joined.reshape({band.blocks, x.size(0) * x.size(1), band.span(), x.size(3)})
                               : joined.reshape({x.size(0) * band.blocks, x.size(1), band.span(), x.size(3)});
}

// The pieces of a bias [batch or 1, heads or 1, queries, keys] that belong to the blocks: [batch or 1, groups
// or 1, blocks, repeats or 1, block, span].
at::Tensor bias_of_blocks(const at::Tensor& bias, const BandLayout& band, std::int64_t groups) {
  const std::int64_t queries = bias.size(2), before = bias.size(3) - queries;
  const at::Tensor padded =
      at::constant_pad_nd(bias, {band.back - before, band.rows() - queries, 0, band.rows() - queries});
  const std::vector<std::int64_t> rows{bias.size(0), bias.size(1), band.blocks, band.block};
  const at::Tensor first =
      at::arange(band.blocks, bias.options().dtype(at::kLong).requires_grad(false)).mul(band.block);
  const at::Tensor columns = first.view({band.blocks, 1, 1})
                                 .add(at::arange(band.span(), first.options()))
                                 .expand({rows[0], rows[1], rows[2], rows[3], band.span()});
  const at::Tensor pieces =
      padded.view({rows[0], rows[1], rows[2], rows[3], padded.size(3)}).gather(4, columns);
  if (bias.size(1) == 1) return pieces.unsqueeze(3);
  return pieces.view({rows[0], groups, bias.size(1) / groups, rows[2], rows[3], band.span()}).transpose(2, 3);
}

// q [n, groups, repeats, block, width], k and v [n, groups, span, width], added [n, groups or 1, repeats or
// 1, block, span] or [n, groups or 1, 1, repeats * block, span].
at::Tensor attend_pieces(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const at::Tensor& added) {
#if PENSTOCK_TORCH_AT_LEAST(2, 0)
  const std::int64_t rows = q.size(2) * q.size(3);
  const bool is_stacked = added.size(3) == rows;
  const at::Tensor stacked_bias =
      added.expand({added.size(0), added.size(1), is_stacked ? 1 : q.size(2), -1, -1})
          .reshape({added.size(0), added.size(1), rows, added.size(4)});
  return at::scaled_dot_product_attention(q.reshape({q.size(0), q.size(1), rows, q.size(4)}), k, v,
                                          stacked_bias.to(q.scalar_type()), 0.0, false)
      .reshape(q.sizes());
#else
  return attend_recomputed(q, k, v, added, std::nullopt);
#endif
}

}  // namespace

at::Tensor attend_in_band(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionMask& mask, std::int64_t window) {
  const std::int64_t batch = q.size(0), queries = q.size(2), width = q.size(3), groups = k.size(1),
                     repeats = q.size(1) / groups;
  const BandLayout band = BandLayout::of(queries, window);
  const at::Tensor blocks = at::constant_pad_nd(q, {0, 0, 0, band.rows() - queries})
                                .view({batch, groups, repeats, band.blocks, band.block, width})
                                .transpose(2, 3);  // [batch, groups, blocks, repeats, block, width]
#if PENSTOCK_TORCH_AT_LEAST(2, 0)
  // The masks of stacked queries are kept for the next layers, unless a bias makes them differ.
  const std::int64_t stored_repeats = mask.added().defined() ? 1 : repeats;
  const at::ScalarType dtype = q.scalar_type();
#else
  const std::int64_t stored_repeats = 1;
  const at::ScalarType dtype = dtype_of_products(q.scalar_type());
#endif
  // [batch or 1, blocks, stored repeats * block, span]
  at::Tensor added = mask.band_bias(q, dtype, stored_repeats, window);
  const BandOrder order{added.size(0) == 1 && !mask.added().defined()};
  if (mask.added().defined()) {
    const at::Tensor pieces = bias_of_blocks(mask.added().to(dtype), band, groups);
    added = added.view({added.size(0), 1, band.blocks, 1, band.block, band.span()}).add(pieces);
    added = BandOrder{false}(added.expand({batch, added.size(1), band.blocks, added.size(3), -1, -1}));
  } else {
    added = added.view({added.size(0) * band.blocks, 1, 1, stored_repeats * band.block, band.span()});
  }
  const at::Tensor mixed = attend_pieces(order(blocks), keys_of_blocks(k, band, queries, order),
                                         keys_of_blocks(v, band, queries, order), added);
  return order
      .back(mixed, batch, groups, band.blocks)  // [batch, groups, blocks, repeats, block, width]
      .transpose(2, 3)
      .reshape({batch, q.size(1), band.rows(), width})
      .narrow(2, 0, queries);
}

at::Tensor attend_in_query_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionMask& mask, std::int64_t window) {
  const std::int64_t groups = k.size(1), queries = q.size(2), before = k.size(2) - queries,
                     hidden = mask.keys() - k.size(2);  // keys of the mask that are not in k
  const at::Tensor by_group = in_groups(q, groups), keys = k.contiguous(), values = v.contiguous();
  std::vector<at::Tensor> results;
  for (std::int64_t first = 0; first < queries; first += kQueryBlock) {
    const std::int64_t count = std::min(kQueryBlock, queries - first);
    const std::int64_t begin = window == 0 ? 0 : std::max<std::int64_t>(before + first - (window - 1), 0);
    const std::int64_t seen = before + first + count - begin;
    const MaskRange range{first, count, hidden + begin, seen};
    c10::optional<at::Tensor> added;
    if (mask.added().defined())
      added = bias_in_groups(mask.added().narrow(2, first, count).narrow(3, range.first_key, seen), groups);
    results.push_back(attend_recomputed(by_group.narrow(3, first, count), keys.narrow(2, begin, seen),
                                        values.narrow(2, begin, seen), added, MaskPart{mask, range, window}));
  }
  return at::cat(results, 3).reshape(q.sizes());
}

}  // namespace penstock
