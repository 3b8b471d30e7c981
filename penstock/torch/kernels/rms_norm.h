// Root mean square normalization over the last dim: x / sqrt(mean(x^2) + epsilon) * weight.
//
// On a GPU it is one kernel forward and one backward (plus a sum for the weight's gradient), dispatcher
// operators penstock::rms_norm and penstock::rms_norm_backward; elsewhere, for float64, for subclasses that
// are not fake and for rows of more than 16,384 elements it is plain operators. 16-bit dtypes are computed in
// float32. The result has the dtype of x; for a float32 x on a GPU within an autocast scope it has the dtype
// of that scope, as the products that follow need it, rounded once. Keeps nothing for backward but x, the
// weight and, on a GPU, one number for each row. Nothing waits for the device. On a GPU a second derivative
// is an error (once_differentiable.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock {

// `weight`: of any floating dtype and of any shape that can be multiplied with x; undefined for none. Throws
// ValueError if x has no floating dtype, or the weight does not fit.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);

}  // namespace penstock
