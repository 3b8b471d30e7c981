#include "penstock/torch/kernels/rms_norm.h"

#include <ATen/ATen.h>

#include "penstock/torch/compat/version.h"

namespace penstock {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
#if PENSTOCK_TORCH_AT_LEAST(2, 9)
  if (x.is_cuda()) return at::rms_norm(x, weight.sizes(), weight, epsilon);
#endif
  const auto dtype = x.scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16)
    return rms_norm(x.to(at::kFloat), weight.to(at::kFloat), epsilon).to(dtype);
  const at::Tensor scale = at::rsqrt(at::mean(at::mul(x, x), -1, true).add(epsilon));
  return at::mul(at::mul(x, scale), weight);
}

}  // namespace penstock
