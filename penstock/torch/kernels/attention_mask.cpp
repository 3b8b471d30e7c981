#include "penstock/torch/kernels/attention_mask.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

// Blocks of half a window waste a third of the computed scores; smaller ones copy keys more often.
constexpr std::int64_t kBlockMultiple = 64;

std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::string mask_input_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

at::Tensor positions_from(std::int64_t first, std::int64_t count, const at::Tensor& like) {
  return at::arange(first, first + count, like.options().dtype(at::kInt).requires_grad(false));
}

at::Tensor lower_triangle(std::int64_t queries, std::int64_t keys, const at::Tensor& like) {
  return at::tril(like.new_ones({queries, keys}, like.options().dtype(at::kBool)), keys - queries);
}

}  // namespace

BandLayout BandLayout::of(std::int64_t queries, std::int64_t window) {
  BandLayout band;
  band.block = rounded_up(std::max<std::int64_t>((window + 1) / 2, 1), kBlockMultiple);
  band.blocks = (queries + band.block - 1) / band.block;
  band.back = rounded_up(window - 1, band.block);
  return band;
}

AttentionMask AttentionMask::causal(std::int64_t queries, std::int64_t keys) {
  if (queries > keys)
    throw ValueError(describe("attention: queries", fmt::format("{}", queries),
                              fmt::format("at most the number of keys, {}", keys)));
  AttentionMask mask;
  mask.queries_ = queries;
  mask.keys_ = keys;
  return mask;
}

AttentionMask AttentionMask::within_documents(const at::Tensor& documents) {
  if (!documents.defined() || documents.dim() != 2)
    throw ValueError(
        describe("attention: documents", mask_input_text(documents), "integers of 2 dims: batch, length"));
  return causal(documents.size(1), documents.size(1)).with_documents(documents);
}

AttentionMask AttentionMask::without_derived() const {
  AttentionMask mask;
  mask.queries_ = queries_;
  mask.keys_ = keys_;
  mask.documents_ = documents_;
  mask.valid_ = valid_;
  mask.positions_ = positions_;
  mask.added_ = added_;
  return mask;
}

AttentionMask AttentionMask::with_documents(const at::Tensor& documents) const {
  if (!documents.defined() || documents.dim() != 2 || documents.size(1) != keys_ ||
      !at::isIntegralType(documents.scalar_type(), true))
    throw ValueError(describe("attention: documents", mask_input_text(documents),
                              fmt::format("integers [batch, {}], one for each key", keys_)));
  AttentionMask mask = without_derived();
  mask.documents_ = documents;
  return mask;
}

AttentionMask AttentionMask::with_valid(const at::Tensor& counts) const {
  if (!counts.defined() || counts.dim() != 1 || !at::isIntegralType(counts.scalar_type(), false))
    throw ValueError(describe("attention: row-valid counts", mask_input_text(counts),
                              "integers [batch], the number of valid tokens of each row"));
  AttentionMask mask = without_derived();
  mask.valid_ = counts;
  return mask;
}

AttentionMask AttentionMask::with_positions(const at::Tensor& positions) const {
  if (!positions.defined() || positions.dim() != 2 || positions.size(1) != keys_ ||
      !at::isIntegralType(positions.scalar_type(), false))
    throw ValueError(describe("attention: positions", mask_input_text(positions),
                              fmt::format("integers [batch, {}], one for each key", keys_)));
  AttentionMask mask = without_derived();
  mask.positions_ = positions;
  return mask;
}

AttentionMask AttentionMask::with_bias(const at::Tensor& bias) const {
  if (!bias.defined() || bias.dim() != 4 || bias.size(2) != queries_ || bias.size(3) != keys_ ||
      !bias.is_floating_point())
    throw ValueError(describe("attention: additive bias", mask_input_text(bias),
                              fmt::format("floating point [batch or 1, heads or 1, {}, {}]", queries_, keys_),
                              "the last two dims are queries and keys"));
  AttentionMask mask = without_derived();
  mask.added_ = bias;
  return mask;
}

std::int64_t AttentionMask::first_key(std::int64_t window) const {
  return window == 0 ? 0 : std::max<std::int64_t>(keys_ - queries_ - (window - 1), 0);
}

at::Tensor AttentionMask::allowed_within(const MaskRange& range, std::int64_t window,
                                         const at::Tensor& like) const {
  const std::int64_t first_query = keys_ - queries_ + range.first_query;  // as an index of a key
  const at::Tensor query = positions_from(first_query, range.queries, like).unsqueeze(1),
                   key = positions_from(range.first_key, range.keys, like);
  const at::Tensor distance = query.sub(key);  // [queries, keys]
  at::Tensor allowed = distance.ge(0);
  if (window > 0) allowed = allowed.logical_and(distance.lt(window));
  allowed = allowed.view({1, 1, range.queries, range.keys});
  if (documents_.defined())
    allowed = allowed.logical_and(documents_.narrow(1, first_query, range.queries)
                                      .unsqueeze(2)
                                      .eq(documents_.narrow(1, range.first_key, range.keys).unsqueeze(1))
                                      .unsqueeze(1));
  if (window > 0 && positions_.defined())
    allowed = allowed.logical_and(positions_.narrow(1, first_query, range.queries)
                                      .unsqueeze(2)
                                      .sub(positions_.narrow(1, range.first_key, range.keys).unsqueeze(1))
                                      .lt(window)
                                      .unsqueeze(1));
  if (valid_.defined())
    allowed = allowed.logical_and(key.lt(valid_.view({-1, 1, 1, 1}))).logical_or(distance.eq(0));
  return allowed;
}

const at::Tensor& AttentionMask::allowed(const at::Tensor& like, std::int64_t window) const {
  at::Tensor& form = allowed_[window];
  if (form.defined()) return form;
  const MaskRange all{0, queries_, first_key(window), keys_within(window)};
  form = window == 0 && !differs_in_batch()
             ? lower_triangle(queries_, keys_, like).view({1, 1, queries_, keys_})
             : allowed_within(all, window, like);
  return form;
}

at::Tensor minus_infinity_unless(const at::Tensor& allowed, at::ScalarType dtype) {
  return allowed.new_zeros(allowed.sizes(), allowed.options().dtype(dtype))
      .masked_fill_(allowed.logical_not(), -std::numeric_limits<double>::infinity());
}

const at::Tensor& AttentionMask::bias(const at::Tensor& like, std::int64_t repeats,
                                      std::int64_t window) const {
  at::Tensor& form = bias_[{window, like.scalar_type(), repeats}];
  if (form.defined()) return form;
  const at::Tensor once = minus_infinity_unless(allowed(like, window).squeeze(1), like.scalar_type());
  return form = repeats == 1 ? once : once.repeat({1, repeats, 1});
}

const at::Tensor& AttentionMask::band_bias(const at::Tensor& like, at::ScalarType dtype, std::int64_t repeats,
                                           std::int64_t window) const {
  at::Tensor& form = band_[{window, dtype, repeats}];
  if (form.defined()) return form;
  const BandLayout band = BandLayout::of(queries_, window);
  const std::int64_t before = keys_ - queries_;
  // Positions count from the first query of a block; `start` [blocks, 1, 1] is that query, as a key's index.
  const at::Tensor start =
      positions_from(0, band.blocks, like).mul(band.block).add(before).view({band.blocks, 1, 1});
  const at::Tensor query = positions_from(0, band.block, like).unsqueeze(1),
                   key = positions_from(-band.back, band.span(), like);
  const at::Tensor distance = query.sub(key);                             // [block, span]
  const at::Tensor is_self = distance.eq(0), key_index = start.add(key);  // [blocks, 1, span]
  at::Tensor seen = distance.ge(0).logical_and(distance.lt(window)).logical_and(key_index.ge(0));
  seen = seen.unsqueeze(0);  // [1, blocks, block, span]
  // Numbers of tokens [batch, keys] as those of the queries, [batch, blocks, block, 1], and of the keys,
  // [batch, blocks, 1, span]. Rows and columns outside of the sequence get a number; the rest of the mask
  // excludes their keys.
  const auto in_blocks = [&](const at::Tensor& numbers) {
    const at::Tensor padded = at::constant_pad_nd(numbers, {band.back - before, band.rows() - queries_});
    return std::pair(
        padded.narrow(1, band.back, band.rows()).view({numbers.size(0), band.blocks, band.block, 1}),
        padded.unfold(1, band.span(), band.block).unsqueeze(2));
  };
  if (documents_.defined()) {
    const auto [of_queries, of_keys] = in_blocks(documents_);
    seen = seen.logical_and(of_queries.eq(of_keys));
  }
  if (positions_.defined()) {
    const auto [of_queries, of_keys] = in_blocks(positions_);
    seen = seen.logical_and(of_queries.sub(of_keys).lt(window));
  }
  if (valid_.defined()) seen = seen.logical_and(key_index.lt(valid_.view({-1, 1, 1, 1})));
  const at::Tensor once = minus_infinity_unless(seen.logical_or(is_self), dtype);
  return form = repeats == 1 ? once : once.repeat({1, 1, repeats, 1});
}

const at::Tensor& AttentionMask::padding_queries() const {
  if (!padding_queries_.defined())
    padding_queries_ = positions_from(keys_ - queries_, queries_, valid_)
                           .ge(valid_.unsqueeze(1))
                           .view({valid_.size(0), 1, queries_, 1});
  return padding_queries_;
}

}  // namespace penstock
