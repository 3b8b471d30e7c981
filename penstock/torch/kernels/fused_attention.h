// Attention of queries to keys: by LibTorch's fused kernels where it has them (2.0 and newer), else by two batched products.
//
//   const AttentionMask mask = AttentionMask::causal(queries, keys, like);                    // nothing is made for the common case
//   const AttentionMask mask = AttentionMask::within_documents(documents);                    // causal, and only within a document
//   y = attend(q, k, v, mask);                                                                // [batch, heads, queries, width]
//
// Keys and values may have fewer heads than queries (grouped queries): query head h uses key head h / (heads / key heads).
// Scores are scaled by 1 / sqrt(width). Nothing here waits for a GPU. Plain and fake tensors; not distributed ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

// Which keys a query sees. Made once for all layers of a forward; a layer may add a form of its own to it, so one thread uses it.
class AttentionMask {
 public:
  // Query i sees keys up to i + keys - queries: the queries are the last ones. `like`: a tensor of the device.
  static AttentionMask causal(std::int64_t queries, std::int64_t keys, const at::Tensor& like);
  // documents [batch, length]: any integers; a token sees those before it of the same number.
  static AttentionMask within_documents(const at::Tensor& documents);

  bool is_plain_causal() const { return plain_causal_; }
  bool sees_everything() const { return !plain_causal_ && !allowed_.defined(); }
  // bool [batch or 1, 1, queries, keys].
  const at::Tensor& allowed(const at::Tensor& like) const;
  // 0 where seen and -inf elsewhere, each row `repeats` times one after the other: [batch or 1, repeats * queries, keys].
  const at::Tensor& bias(const at::Tensor& like, std::int64_t repeats) const;

 private:
  std::int64_t queries_ = 0, keys_ = 0;
  bool plain_causal_ = false;    // as many queries as keys, and nothing but the order counts
  mutable at::Tensor allowed_;   // undefined: all, or not made yet
  mutable at::Tensor bias_;
  mutable std::int64_t bias_repeats_ = 0;
};

// q [batch, heads, queries, width], k and v [batch, key heads, keys, width]. Throws ValueError for heads that are no multiple of key
// heads.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionMask& mask);

// The same by plain operators, in every version: what the fused kernels are tested against.
at::Tensor attend_by_products(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionMask& mask);

}  // namespace penstock
