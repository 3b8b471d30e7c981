// Optimizer kernels that process all parameters in one pass over memory, where available: LibTorch's on CUDA
// (from 2.4 on), our own on the CPU for float32.
//
// Each function returns whether it did the work; if false, nothing has changed and the caller must use single
// operators. All lists have the same length, and tensors at the same position have the same shape. A kernel
// is used if all tensors have the same dtype and device and are dense, and those at the same position have
// the same layout. Version counters are not incremented: the caller must call bump_version().
//
// The CPU steps round every operation separately and treat elements independently, so the bits do not depend
// on how a tensor is split, where it starts, or the number of threads. Thread safety: as for operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

struct AdamWStepOptions {
  double lr, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // the number of this step, from 1
};

bool fused_adamw_(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, const AdamWStepOptions& numbers);

struct SgdStepOptions {
  double lr, momentum;
  double weight_decay;
  bool nesterov;
  bool decoupled;  // the decay shrinks the parameter first; otherwise it is added to the gradient
};

// `momenta` is empty if the momentum is 0, and zeros before the first step.
bool fused_sgd_(at::TensorList parameters, at::TensorList gradients, at::TensorList momenta,
                const SgdStepOptions& numbers);

// The sum of the squares of all elements: a float64 scalar on the device of the tensors, which must all be on
// the same one. On the CPU, float32 is summed in float64; elsewhere LibTorch's norm is used for each tensor.
at::Tensor sum_of_squares(at::TensorList tensors);

// Multiplies every tensor by a scalar on the device; the host does not wait for it.
void scale_(at::TensorList tensors, const at::Tensor& factor);

}  // namespace penstock
