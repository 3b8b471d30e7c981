// Depth-wise causal convolution along the tokens of a row: each channel has its own taps.
//
//   // x [batch, length, channels], weight [channels, taps], bias [channels] or undefined
//   y = causal_convolution({.x = x, .weight = weight, .bias = bias, .documents = documents, .silu = true});
//
//   // generation: the last taps - 1 inputs are handed on
//   auto [y, memory] = causal_convolution_step({.x = token, .weight = weight, .bias = bias}, memory);
//
// y[t] = sum over k of weight[k] * x[t - (taps - 1) + k] + bias, then silu if asked for; weight[taps - 1]
// belongs to the token itself. Taps that reach before the row or into another document
// (document_starts.h) count as zero.
//
// Dispatcher operators penstock::causal_convolution and penstock::causal_convolution_backward with kernels
// for the CPU, CUDA and shapes only, so that modes see them and captured graphs contain them. 16-bit inputs
// are computed in float32 and rounded once; weights are used in float32 (float64 for float64). A second
// derivative is an error (once_differentiable.h). The gradients do not depend on the number of threads.
// Thread safety: as for tensors. Nothing waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock {

struct CausalConvolution {
  at::Tensor x;               // [batch, length, channels]; rows of a larger tensor are read in place
  at::Tensor weight;          // [channels, taps]
  at::Tensor bias = {};       // [channels]
  at::Tensor documents = {};  // integers [batch, length]
  bool silu = false;
};

// Returns [batch, length, channels] in the dtype of x. Throws ValueError for shapes that do not fit.
at::Tensor causal_convolution(const CausalConvolution& job);

// A piece of a row: its results, and what the next piece needs.
struct ConvolutionPiece {
  at::Tensor y;       // of the new tokens
  at::Tensor memory;  // [batch, taps - 1, channels], the last inputs
};

// Continues a row whose last inputs are `memory` [batch, taps - 1, channels] (zeros at the beginning). With
// documents, `memory_documents` [batch, taps - 1] has the numbers of those inputs. Throws like
// causal_convolution.
ConvolutionPiece causal_convolution_step(const CausalConvolution& job, const at::Tensor& memory,
                                         const at::Tensor& memory_documents = {});

}  // namespace penstock
