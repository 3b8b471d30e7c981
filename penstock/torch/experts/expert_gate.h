// SwiGLU of the rows of experts, each multiplied by the weight of its choice.
//
//   // gate and up [T * k, F] sorted by expert, weights [T, k]
//   at::Tensor inner = weighted_silu_product(gate, up, weights, order);    // [T * k, F]
//   at::Tensor y = sum_rows(grouped_product(inner, down, order.ends), order);
//
// inner[s] = weight of the choice in slot s * silu(gate[s]) * up[s]. A product with `down` is linear, so that
// y is the weighted sum of the experts' results. Compared with combine_rows(), which weighs these results,
// the gradient of a weight needs no result of the second product: nothing keeps it, and a recomputed layer
// ends before that product.
//
// One pass over memory in each direction, a registered operator with its own derivative, computed in float32
// (float64 for float64) and rounded once. backward reads gate and up again. Results do not depend on the
// number of threads. Slots without a choice are zero, as are their gradients, whatever the rows hold.
// A second derivative is an error (once_differentiable.h). Nothing waits for the device. Thread safety: as
// for tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "penstock/torch/experts/expert_choice.h"

namespace penstock {

// gate and up: [T * k, F] of the same floating dtype. `weights`: [T, k] of float32, or float64 for rows in
// float64. Weights of dropped choices have a gradient of zero.
at::Tensor weighted_silu_product(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                                 const ExpertOrder& order);
// The same of the two halves of each row: [T * k, 2 * F] -> [T * k, F]. The gradient is one tensor, too.
at::Tensor weighted_silu_halves(const at::Tensor& joint, const at::Tensor& weights, const ExpertOrder& order);

}  // namespace penstock
