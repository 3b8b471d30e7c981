// Replaces causal_convolution_cuda.cpp in builds without CUDA.
#include "penstock/errors.h"
#include "penstock/torch/scan/causal_convolution_kernels.h"

namespace penstock::detail {

void convolve_on_cuda(const ConvolutionTensors&, const at::Tensor&) {
  throw StateError("a CUDA convolution was called in a build without CUDA");
}
void convolve_backward_on_cuda(const ConvolutionTensors&, const at::Tensor&, const ConvolutionGradients&) {
  throw StateError("a CUDA convolution was called in a build without CUDA");
}

}  // namespace penstock::detail
