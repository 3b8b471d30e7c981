// Replaces rms_norm_cuda.cpp in builds without CUDA.
#include "penstock/errors.h"
#include "penstock/torch/kernels/rms_norm_kernels.h"

namespace penstock::detail {

namespace {
[[noreturn]] void no_norm_kernel() { throw StateError("a CUDA kernel was called in a build without CUDA"); }
}  // namespace

bool has_norm_kernels(const at::Tensor&, const at::Tensor&) { return false; }
void launch_rms_norm(const at::Tensor&, const at::Tensor&, double, const at::Tensor&, const at::Tensor&) {
  no_norm_kernel();
}
at::Tensor launch_rms_norm_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                    const at::Tensor&, const at::Tensor&) {
  no_norm_kernel();
}

}  // namespace penstock::detail
