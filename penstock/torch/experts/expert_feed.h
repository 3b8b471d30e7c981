// The SwiGLU of every expert for its tokens, without a derivative.
//
//   at::Tensor y = expert_feed(tokens, gate, up, down, weights, order);      // [T, D], weights [T, k]
//
// y is what gather_rows(), grouped_product(), weighted_silu_product() and sum_rows() compute together. Here
// one expert after the other takes all of these steps, so that its rows stay in the caches, and memory for
// the largest expert alone is needed instead of for all choices. Sums over the choices of a token are
// computed in the order of the experts: for one or two choices a token the bits are those of the operators
// above.
//
// A registered operator of the CPU for float32 and float64. Results do not depend on the number of threads
// beyond what LibTorch's products do. Thread safety: as for tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "penstock/torch/experts/expert_choice.h"

namespace penstock {

// Whether expert_feed() takes these arguments, nothing needs a gradient, and its bits are those of the
// single operators.
bool can_use_expert_feed(const at::Tensor& tokens, const at::Tensor& gate, const at::Tensor& up,
                         const at::Tensor& down, const at::Tensor& weights);

// tokens: [T, D]; gate and up: [experts, D, F]; down: [experts, F, D], all of the same dtype, which that of
// `weights`, [T, k], must be, too. Throws ValueError for other shapes and dtypes, and StateError
// if a gradient would be recorded, since it has no derivative.
at::Tensor expert_feed(const at::Tensor& tokens, const at::Tensor& gate, const at::Tensor& up,
                       const at::Tensor& down, const at::Tensor& weights, const ExpertOrder& order);

}  // namespace penstock
