// Causal attention with a window by one kernel that skips the keys outside of it: the flash kernel of
// LibTorch 2.5 and newer on GPUs of compute capability 8.0 and newer, for 16-bit types. Captured graphs
// contain it as penstock::window_attention.
//
//   if (has_window_kernel(q, k)) y = attend_in_window(q, k, v, 512);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

// q [batch, heads, queries, width], k [batch, key heads, keys, width].
bool has_window_kernel(const at::Tensor& q, const at::Tensor& k);

// Query i sees the `window` keys up to i + keys - queries. Key heads may be fewer than heads. Differentiable
// once.
at::Tensor attend_in_window(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            std::int64_t window);

namespace detail {
// The device side; replaced in builds without CUDA.

// Whether the flash and memory-efficient kernels run on the device of a tensor, with all dtypes.
bool device_has_fused_attention(const at::Tensor& tensor);
}  // namespace detail

}  // namespace penstock
