// Attention of queries to keys: LibTorch's fused kernels where available (2.0 and newer), otherwise batched
// products.
//
//   const AttentionMask mask = AttentionMask::causal(length, length);  // attention_mask.h; allocates nothing
//   y = attend(q, k, v, mask);       // [batch, heads, queries, width]
//   y = attend(q, k, v, mask, 512);  // a token sees itself and the 511 tokens before it
//
// Keys and values may have fewer heads than queries (grouped queries): query head h uses key head h / (heads
// / key heads). Scores are scaled by 1 / sqrt(width). Long rows with a window, documents, padding or a bias
// are computed in blocks (block_attention.h, window_attention.h), in memory proportional to length * window,
// or to length without a window. Nothing here waits for a GPU. Plain and fake tensors; not distributed ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "penstock/torch/kernels/attention_mask.h"

namespace penstock {

// q [batch, heads, queries, width], k and v [batch, key heads, keys, width]. With a window (0: none), k and v
// may lack the keys that no query sees: they are the last ones. Throws ValueError if heads is not a multiple
// of key heads and if the mask does not match.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionMask& mask,
                  std::int64_t window = 0);

// The same by plain operators and a mask of all queries and keys, in every version; the fused kernels are
// tested against it.
at::Tensor attend_by_products(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionMask& mask, std::int64_t window = 0);

}  // namespace penstock
