// The loops and kernels of causal_convolution.h. `real` is the dtype of computation: float64 for float64,
// otherwise float32. Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock::detail {

// One convolution. Optional tensors are undefined if absent.
struct ConvolutionTensors {
  at::Tensor x;       // [batch, length, channels], any strides of batch and length, channels adjacent
  at::Tensor weight;  // [channels, taps], real, contiguous
  at::Tensor bias;    // [channels], real, contiguous
  at::Tensor starts;  // int32 [batch, length], contiguous
  bool silu = false;
};

// Contiguous, allocated by the caller: x like `gradient`, weight and bias in real.
struct ConvolutionGradients {
  at::Tensor x, weight, bias;
};

// float32 and float64 only.
void convolve_on_cpu(const ConvolutionTensors& in, const at::Tensor& result);
void convolve_backward_on_cpu(const ConvolutionTensors& in, const at::Tensor& gradient,
                              const ConvolutionGradients& out);

// float32, float64, bfloat16 and float16 on one GPU.
void convolve_on_cuda(const ConvolutionTensors& in, const at::Tensor& result);
void convolve_backward_on_cuda(const ConvolutionTensors& in, const at::Tensor& gradient,
                               const ConvolutionGradients& out);

}  // namespace penstock::detail
