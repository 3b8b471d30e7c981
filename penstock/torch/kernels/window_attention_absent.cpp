// Replaces window_attention_cuda.cpp in builds without CUDA.
#include "penstock/torch/kernels/window_attention.h"

namespace penstock::detail {

bool device_has_fused_attention(const at::Tensor&) { return false; }

}  // namespace penstock::detail
