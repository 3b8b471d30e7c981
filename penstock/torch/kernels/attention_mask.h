// Which keys a query of an attention sees: earlier tokens of its own document, without padding, and what is
// added to their scores.
//
//   AttentionMask mask = AttentionMask::causal(length, length).with_documents(documents).with_valid(counts);
//   y = attend(q, k, v, mask, 512);     // fused_attention.h; a layer with a window of 512
//   z = attend(q, k, v, mask);          // a layer without one, with the same mask
//
// Create it once for all layers of a forward. Tensors with one element per pair of tokens are created only on
// request, for short rows (allowed, bias) or a band along the diagonal (band_bias), and are kept for the
// following layers; use a mask on one thread only. Plain and fake tensors. Nothing waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <tuple>

namespace penstock {

// Queries in blocks, each with the keys of its own block and of the blocks before it that a window reaches:
// the pieces of the score matrix that are computed for a window.
//
//         keys     <-- back -->
//   queries  0     . . . . # # #          block i sees the keys from i * block - back to (i + 1) * block,
//            1             . . . # # #    counted from the first query
struct BandLayout {
  std::int64_t block = 0;   // queries in a block
  std::int64_t blocks = 0;  // the last one may be partly empty
  std::int64_t back = 0;    // keys before a block, a multiple of `block`, at least window - 1

  std::int64_t span() const { return block + back; }  // keys of a block
  std::int64_t rows() const { return block * blocks; }
  static BandLayout of(std::int64_t queries, std::int64_t window);
};

// A range of queries and one of keys, as indices into the queries and keys of a mask.
struct MaskRange {
  std::int64_t first_query = 0, queries = 0, first_key = 0, keys = 0;
};

class AttentionMask {
 public:
  // Query i sees keys up to i + keys - queries: the queries are the last ones. Throws ValueError for more
  // queries than keys.
  static AttentionMask causal(std::int64_t queries, std::int64_t keys);
  // causal() for whole rows, with documents.
  static AttentionMask within_documents(const at::Tensor& documents);

  // These return the mask with one more restriction. They throw ValueError for other shapes and dtypes.

  // documents [batch, keys]: any integers; a token sees only tokens with its own number.
  AttentionMask with_documents(const at::Tensor& documents) const;
  // counts [batch], integers: tokens at and after the count of their row are padding. No token sees them,
  // and the result of attend() for them is zero.
  AttentionMask with_valid(const at::Tensor& counts) const;
  // positions [batch, keys], integers that ascend by at least 1 within a row: windows count them instead of
  // keys, for rows from which tokens were left out. For layers with a window only.
  AttentionMask with_positions(const at::Tensor& positions) const;
  // bias [batch or 1, heads or 1, queries, keys]: added to the scaled scores. Differentiable.
  AttentionMask with_bias(const at::Tensor& bias) const;

  std::int64_t queries() const { return queries_; }
  std::int64_t keys() const { return keys_; }
  const at::Tensor& documents() const { return documents_; }  // undefined: one document
  const at::Tensor& valid() const { return valid_; }          // undefined: no padding
  const at::Tensor& positions() const { return positions_; }  // undefined: 0, 1, ...
  const at::Tensor& added() const { return added_; }          // the additive bias; undefined: none
  // Nothing but causality.
  bool is_causal_only() const { return !differs_in_batch() && !added_.defined(); }
  bool is_plain_causal() const { return is_causal_only() && queries_ == keys_ && queries_ > 1; }
  bool sees_everything() const { return is_causal_only() && queries_ == 1; }
  // Whether rows of the batch may have different masks.
  bool differs_in_batch() const { return documents_.defined() || valid_.defined() || positions_.defined(); }

  // The first key that any query sees in a layer with this window (0: no window), the keys from there on.
  std::int64_t first_key(std::int64_t window) const;
  std::int64_t keys_within(std::int64_t window) const { return keys_ - first_key(window); }

  // ---- derived tensors, without the additive bias. A query that is padding sees itself only: a row of
  // scores that is masked entirely would become NaN ----

  // bool [batch or 1, 1, queries, keys] for a part of the pairs; not kept.
  at::Tensor allowed_within(const MaskRange& range, std::int64_t window, const at::Tensor& like) const;
  // bool [batch or 1, 1, queries, keys_within(window)]. Here and below, `like` is a tensor on the device.
  const at::Tensor& allowed(const at::Tensor& like, std::int64_t window = 0) const;
  // The same as 0 where seen and -inf elsewhere, with each row repeated `repeats` times: [batch or 1, repeats
  // * queries, keys_within(window)].
  const at::Tensor& bias(const at::Tensor& like, std::int64_t repeats, std::int64_t window = 0) const;
  // 0 or -inf for all blocks of the band of a window: [batch or 1, blocks, repeats * block, span].
  const at::Tensor& band_bias(const at::Tensor& like, at::ScalarType dtype, std::int64_t repeats,
                              std::int64_t window) const;
  // bool [batch, 1, queries, 1]: queries that are padding. Only with with_valid().
  const at::Tensor& padding_queries() const;

 private:
  AttentionMask without_derived() const;

  std::int64_t queries_ = 0, keys_ = 0;
  at::Tensor documents_, valid_, positions_, added_;

  using FormKey = std::tuple<std::int64_t, at::ScalarType, std::int64_t>;  // window, dtype, repeats
  mutable std::map<std::int64_t, at::Tensor> allowed_;                     // by window
  mutable std::map<FormKey, at::Tensor> bias_, band_;
  mutable at::Tensor padding_queries_;
};

// `allowed` (bool) as 0 where true and -inf elsewhere.
at::Tensor minus_infinity_unless(const at::Tensor& allowed, at::ScalarType dtype);

}  // namespace penstock
