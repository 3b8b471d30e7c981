// The device side of rms_norm.h. Tensors are contiguous and on one GPU; the caller allocates the results.
// Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::detail {

// Returns whether this build has kernels for rows of x with this weight.
bool has_norm_kernels(const at::Tensor& x, const at::Tensor& weight);

// x, y [rows, width], each float32, bfloat16 or float16; weight float32 [width]; scales float32 [rows]: what
// x is multiplied by.
void launch_rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon, const at::Tensor& y,
                     const at::Tensor& scales);
// gradient has the dtype of y, x_gradient that of x. Returns the gradient of the weight: the sums of the
// teams of threads in a fixed order.
at::Tensor launch_rms_norm_backward(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
                                    const at::Tensor& scales, const at::Tensor& x_gradient);

}  // namespace penstock::detail
