// Attention in blocks of queries, for long rows with a window, documents, padding or an additive bias. No
// tensor with an element for each pair of tokens is created, forward or backward.
//
//   y = attend_in_band(q, k, v, mask, 512);      // all blocks of a window at once: length * window scores
//   y = attend_in_query_blocks(q, k, v, mask);   // one block after another: block * length scores at a time
//
// A band goes through LibTorch's fused attention (2.0 and newer). Query blocks compute their masks from the
// documents, in backward once more, so that they are not kept: by the memory-efficient kernel of LibTorch 2.5
// and newer on a GPU, elsewhere by two products in float32 (float64 for float64) that backward repeats.
// Variable-length kernels would need the number of documents and their longest length on the host, that is,
// a wait for the device, or a grid for as many documents as there are tokens.
//
// q [batch, heads, queries, width], k and v [batch, key heads, keys, width]: at least the keys that the
// window reaches, the last of the mask. Queries that share a key head are stacked along the rows, so that
// keys are not repeated. Rows of padding queries are finite, not zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "penstock/torch/kernels/attention_mask.h"

namespace penstock {

// window: at least 1.
at::Tensor attend_in_band(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionMask& mask, std::int64_t window);

// window: 0 for none.
at::Tensor attend_in_query_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionMask& mask, std::int64_t window = 0);

}  // namespace penstock
