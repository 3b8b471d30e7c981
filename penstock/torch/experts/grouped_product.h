// Matrix products of rows sorted by expert with one weight per expert.
//
//   // rows [S, D] sorted by expert, weight [experts, D, F], ends int32 [experts] (expert_choice.h)
//   at::Tensor y = grouped_product(rows, weight, order.ends);          // [S, F]
//
// Row s of expert e is multiplied by weight[e]; rows behind the last end give zero and get a zero gradient.
// An expert without rows costs nothing, and its weight has a zero gradient. Rows and weight have the same
// dtype. A registered operator (penstock::grouped_product) with its own derivative; the result's shape does
// not depend on `ends`, and nothing waits for the device. A second derivative is an error
// (once_differentiable.h).
//
// On the CPU it is one product of LibTorch's per expert, in float32 for 16-bit dtypes. On a GPU with compute
// capability 9.0 it is LibTorch's grouped product (2.8 and newer, bfloat16, widths that are multiples of 16
// bytes); otherwise one tiled kernel that finds the expert of each tile from `ends`: on tensor cores for
// bfloat16 and float16 (compute capability 8.0 and newer), with plain multiply-adds for the other dtypes.
// Both add up in float32 (float64 for float64). Thread safety: as for tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock {

at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends);

// [experts, in, a] and [experts, in, b] -> [experts, in, a + b] of `dtype`, in one pass: weights whose
// products with the same rows are one product. Differentiable.
at::Tensor join_columns(const at::Tensor& first, const at::Tensor& second, at::ScalarType dtype);

// How products on a GPU are computed, for tests and benchmarks.
enum class GroupedProductPath {
  Auto,   // LibTorch's grouped product where it applies
  Kernel  // always the tiled kernel
};
// Sets the path for all threads of this process and returns the previous one. Captured device graphs keep
// theirs.
GroupedProductPath set_grouped_product_path(GroupedProductPath path);

}  // namespace penstock
