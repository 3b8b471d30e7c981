// Kernels that work on all parameters of an optimizer in one pass over memory, where there is one for the device: LibTorch's on
// CUDA (from 2.4 on), our own on the CPU for float32.
//
// Each function says whether it did the work; false means that nothing has changed and the caller goes by single operators. The
// lists have one length; tensors of one position share a shape. A kernel takes them if all are of one dtype and device, dense, and
// those of one position are laid out alike. Versions of tensors are not counted: bump_version() is the caller's.
//
// The steps on the CPU round every operation by itself and elements do not know of each other, so the bits do not depend on how a
// tensor is split, where it begins or how many threads work. Thread rule: as for operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

struct AdamWNumbers {
  double lr, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // that this is, from 1
};

bool fused_adamw_(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs, at::TensorList exp_avg_sqs, const AdamWNumbers& numbers);

struct SgdNumbers {
  double lr, momentum;
  double weight_decay;
  bool nesterov;
  bool decoupled;  // the decay shrinks the parameter first; else it is added to the gradient
};

// `momenta` is empty where the momentum is 0, and zeros before the first step.
bool fused_sgd_(at::TensorList parameters, at::TensorList gradients, at::TensorList momenta, const SgdNumbers& numbers);

// The sum of the squares of all elements, without dims, float64, on the tensors' device (one for all). float32 on the CPU is added
// up in float64; elsewhere each tensor is by LibTorch's norm.
at::Tensor sum_of_squares(at::TensorList tensors);

// Multiplies every tensor by a number that is on the device; the host does not wait for it.
void scale_(at::TensorList tensors, const at::Tensor& factor);

}  // namespace penstock
