// The device side of this folder. Tensors are contiguous and on one GPU; the caller allocates the results,
// which are not empty. Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::detail {

// scores: float32 or float64 [T, experts]; choices: int64 [T, count].
void launch_top_choices(const at::Tensor& scores, const at::Tensor& choices);

// choices: int64 [T, k]; the results as in ExpertOrder. Throws NotImplemented for more than 1,024 experts.
void launch_expert_order(const at::Tensor& choices, std::int64_t capacity, const at::Tensor& order,
                         const at::Tensor& slot, const at::Tensor& ends, const at::Tensor& counts);

// Whether the router of so many experts has kernels.
bool routes_on_device(std::int64_t experts);
// logits and bias (or undefined): float32 or float64, [T, experts] and [experts]; choices and weights [T, k].
// Returns the sums over the tokens of the scores, and of the squares of logsumexp: [experts + 1].
at::Tensor launch_route_tokens(const at::Tensor& logits, const at::Tensor& bias, bool sigmoid, bool normalize,
                               const at::Tensor& choices, const at::Tensor& weights);
// by_weights [T, k] and by_means [experts + 1]: gradients. result [T, experts].
void launch_route_tokens_backward(const at::Tensor& logits, const at::Tensor& choices,
                                  const at::Tensor& by_weights, const at::Tensor& by_means, bool sigmoid,
                                  bool normalize, const at::Tensor& result);

void launch_gather_rows(const at::Tensor& tokens, const at::Tensor& order, const at::Tensor& rows);
// `weights` may be undefined.
void launch_combine_rows(const at::Tensor& rows, const at::Tensor& slot, const at::Tensor& weights,
                         const at::Tensor& sums);
void launch_combine_rows_backward(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& order,
                                  const at::Tensor& slot, const at::Tensor& gradient,
                                  const at::Tensor& row_gradient, const at::Tensor& weight_gradient);

// expert_gate.h. Rows of gate and up are contiguous, the distances between them may be larger.
void launch_weighted_gate(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                          const at::Tensor& order, const at::Tensor& inner);
void launch_weighted_gate_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                                   const at::Tensor& order, const at::Tensor& slot,
                                   const at::Tensor& gradient, const at::Tensor& by_gate,
                                   const at::Tensor& by_up, const at::Tensor& by_weight);

// grouped_product.h. `library`: use LibTorch's grouped product where it applies. These allocate their result;
// no tensor is empty.
at::Tensor launch_grouped_product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends,
                                  bool transposed, bool library);
at::Tensor launch_grouped_outer(const at::Tensor& rows, const at::Tensor& gradient, const at::Tensor& ends,
                                bool library);

// Columns of first and second side by side: rows [n, a] and [n, b] <-> [n, a + b], in one pass that also
// casts. `second` may be undefined, b = 0. Any two of float32, float64, bfloat16 and float16.
void launch_join_columns(const at::Tensor& first, const at::Tensor& second, const at::Tensor& joint);
void launch_split_columns(const at::Tensor& joint, const at::Tensor& first, const at::Tensor& second);

}  // namespace penstock::detail
