// Replaces fused_math_cuda.cpp in builds without CUDA.
#include "penstock/errors.h"
#include "penstock/torch/kernels/fused_math_kernels.h"

namespace penstock::detail {

bool has_fused_math(const at::Tensor&) { return false; }

namespace {
[[noreturn]] void absent() { throw StateError("a CUDA kernel was called in a build without CUDA"); }
}  // namespace

void launch_cross_entropy(const at::Tensor&, const at::Tensor&, std::int64_t, const at::Tensor&,
                          const at::Tensor&) {
  absent();
}
void launch_cross_entropy_backward(const at::Tensor&, const at::Tensor&, std::int64_t, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&) {
  absent();
}
void launch_rotate_pairs(const at::Tensor&, const at::Tensor&, bool, const at::Tensor&) { absent(); }
void launch_silu_product(const at::Tensor&, const at::Tensor&, const at::Tensor&) { absent(); }
void launch_silu_product_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                  const at::Tensor&) {
  absent();
}

}  // namespace penstock::detail
