// Root mean square normalization over the last dim: x / sqrt(mean(x^2) + epsilon) * weight.
//
// One fused kernel where LibTorch has it (2.9 and newer, CUDA), otherwise plain operators; 16-bit dtypes are
// computed in float32.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);

}  // namespace penstock
