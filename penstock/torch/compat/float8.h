// Numbers of 8 bits (e4m3: a sign, 4 bits of exponent, 3 of fraction), for tensors on their way between
// ranks.
//
//   at::Tensor bytes = to_float8(values);                           // 132 bytes for each 128 values
//   at::Tensor back = from_float8(bytes, values.numel());           // Float; within 1/16 of each value
//
// Every block of 128 values has a scale of its own, so that its largest value becomes 448, the largest number
// of the format; values below 1/229,376 of the largest become 0. NaN stays NaN, and an infinity becomes NaN,
// because the format has none; the other values of such a block are not scaled. The bytes of a tensor are the
// same on every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

// Returns the number of bytes of `values` values.
std::int64_t float8_bytes(std::int64_t values);

// Takes a tensor of one dim, floating point; returns Byte [float8_bytes(n)], on its device. On CUDA, throws
// NotImplemented for a LibTorch without 8-bit numbers (before 2.1).
at::Tensor to_float8(const at::Tensor& values);

// The inverse: Float [values].
at::Tensor from_float8(const at::Tensor& bytes, std::int64_t values);

}  // namespace penstock
