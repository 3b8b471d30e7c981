// Attention of some queries to some keys under a mask, where backward computes the scores and the mask once
// more instead of keeping them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Optional.h>

#include <cstdint>
#include <optional>

#include "penstock/torch/kernels/attention_mask.h"

namespace penstock {

// In which dtype products of tensors of this dtype are computed: float32 for 16-bit types.
at::ScalarType dtype_of_products(at::ScalarType dtype);

// A part of a mask, computed where it is needed.
struct MaskPart {
  AttentionMask mask;
  MaskRange range;
  std::int64_t window = 0;
};

// q [n, groups, repeats, queries, width], k and v [n, groups, keys, width]; `added`: broadcast to [n, groups,
// repeats, queries, keys], differentiable. Returns the shape of q. Computed in float32 for 16-bit types, and
// rounded once. Every query must see a key.
at::Tensor attend_recomputed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const c10::optional<at::Tensor>& added, const std::optional<MaskPart>& part);

}  // namespace penstock
