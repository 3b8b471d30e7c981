// The device side of fused_math.h. Tensors are contiguous unless stated, on one GPU, float32, bfloat16 or
// float16; the caller allocates the results.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::detail {

// Returns whether this build has kernels for tensors like this one.
bool has_fused_math(const at::Tensor& tensor);

// losses and log_sums: float32 [rows].
void launch_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored,
                          const at::Tensor& losses, const at::Tensor& log_sums);
// scale: float32, one element on the device.
void launch_cross_entropy_backward(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored,
                                   const at::Tensor& log_sums, const at::Tensor& scale,
                                   const at::Tensor& gradient);
// turns as real numbers: float32 [length, 1, n, 2] or [batch, length, 1, n, 2]. `back` rotates in the
// opposite direction.
void launch_rotate_pairs(const at::Tensor& x, const at::Tensor& turns, bool back, const at::Tensor& result);
// Rows [n, width], contiguous within a row. The result, and its gradient in backward, are contiguous; both
// results of backward have the same distance between rows.
void launch_silu_product(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& result);
void launch_silu_product_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& gradient,
                                  const at::Tensor& gate_gradient, const at::Tensor& up_gradient);

}  // namespace penstock::detail
