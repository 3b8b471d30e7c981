// Attention of queries to keys: LibTorch's fused kernels where available (2.0 and newer), otherwise two
// batched products.
//
//   // allocates nothing in the common case
//   const AttentionMask mask = AttentionMask::causal(queries, keys, like);
//   const AttentionMask mask = AttentionMask::within_documents(documents);  // causal, within a document only
//   y = attend(q, k, v, mask);  // [batch, heads, queries, width]
//
// Keys and values may have fewer heads than queries (grouped queries): query head h uses key head h / (heads
// / key heads). Scores are scaled by 1 / sqrt(width). Nothing here waits for a GPU. Plain and fake tensors;
// not distributed ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

// Which keys a query sees. Create it once for all layers of a forward. Layers cache derived forms in it, so
// it must be used by one thread only.
class AttentionMask {
 public:
  // Query i sees keys up to i + keys - queries: the queries are the last ones. `like` is a tensor on the
  // device.
  static AttentionMask causal(std::int64_t queries, std::int64_t keys, const at::Tensor& like);
  // documents [batch, length]: any integers; a token sees itself and earlier tokens with the same number.
  static AttentionMask within_documents(const at::Tensor& documents);

  bool is_plain_causal() const { return plain_causal_; }
  bool sees_everything() const { return !plain_causal_ && !allowed_.defined(); }
  // bool [batch or 1, 1, queries, keys].
  const at::Tensor& allowed(const at::Tensor& like) const;
  // 0 where seen and -inf elsewhere, with each row repeated `repeats` times: [batch or 1, repeats * queries,
  // keys].
  const at::Tensor& bias(const at::Tensor& like, std::int64_t repeats) const;

 private:
  std::int64_t queries_ = 0, keys_ = 0;
  bool plain_causal_ = false;   // as many queries as keys, and no documents
  mutable at::Tensor allowed_;  // undefined: everything is allowed, or not created yet
  mutable at::Tensor bias_;
  mutable std::int64_t bias_repeats_ = 0;
};

// q [batch, heads, queries, width], k and v [batch, key heads, keys, width]. Throws ValueError if heads is
// not a multiple of key heads.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionMask& mask);

// The same by plain operators, in every version; the fused kernels are tested against it.
at::Tensor attend_by_products(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionMask& mask);

}  // namespace penstock
