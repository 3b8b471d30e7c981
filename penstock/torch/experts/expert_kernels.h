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

void launch_gather_rows(const at::Tensor& tokens, const at::Tensor& order, const at::Tensor& rows);
// `weights` may be undefined.
void launch_combine_rows(const at::Tensor& rows, const at::Tensor& slot, const at::Tensor& weights,
                         const at::Tensor& sums);
void launch_combine_rows_backward(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& order,
                                  const at::Tensor& slot, const at::Tensor& gradient,
                                  const at::Tensor& row_gradient, const at::Tensor& weight_gradient);

// grouped_product.h. `library`: use LibTorch's grouped product where it applies. These allocate their result;
// no tensor is empty.
at::Tensor launch_grouped_product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends,
                                  bool transposed, bool library);
at::Tensor launch_grouped_outer(const at::Tensor& rows, const at::Tensor& gradient, const at::Tensor& ends,
                                bool library);

}  // namespace penstock::detail
