// Element-wise kernels of the batched scan (scan_batched.cpp), each of them one pass over memory. All tensors
// are contiguous and on one GPU; the length is a multiple of the chunk. "Head-major" is [batch, chunks,
// heads, chunk, ...], "group-major" [batch, chunks, groups, chunk, group width]. Sums and exponentials are
// real. Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include "penstock/torch/scan/scan_kernels.h"

namespace penstock::detail {

// The logarithms of decays, summed within a chunk: real [batch, chunks, heads, chunk].
void launch_sums(const ScanTensors& in, const at::Tensor& sums);

// weights [.., heads, chunk, chunk] = gram [.., groups, chunk, chunk] * decay between two tokens.
void launch_weights(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& gram,
                    const at::Tensor& weights);

// inputs = values * steps, head-major; passed = inputs * decay to the end of the chunk, group-major.
void launch_inputs(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& inputs,
                   const at::Tensor& passed);

// From what each chunk adds to the state to the state before each chunk, and the last one.
void launch_pass(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& added,
                 const at::Tensor& states, const at::Tensor& last);

// result = inside (head-major) + decay since the chunk began * read (group-major) + skip * values.
void launch_join(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& inside,
                 const at::Tensor& read, const at::Tensor& result);

// ---- backward ----

// gradient: like the values. `arrived`: head-major copy; `scaled`: times the decay since the chunk began,
// group-major.
void launch_gradients(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& gradient,
                      const at::Tensor& arrived, const at::Tensor& scaled);

// products (real) and weights [.., heads, chunk, chunk]; to_gram = sum over the heads of decay * products;
// row_sums (real, like sums) = sum over the columns of weights * products. The diagonal, the weights of a
// token's own input, is in own_weights (like sums) instead of weights and row_sums.
void launch_weights_backward(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& gram,
                             const at::Tensor& products, const at::Tensor& weights, const at::Tensor& to_gram,
                             const at::Tensor& row_sums, const at::Tensor& own_weights);

// From the gradients of states that arise within the chunks to those of the state after each chunk.
// from_last (real) may be undefined.
void launch_pass_backward(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& added,
                          const at::Tensor& from_last, const at::Tensor& gradients,
                          const at::Tensor& initial);

// ends (real [batch, chunks, heads]) = decay of a chunk * state before it * gradient of the state after it.
void launch_ends(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& states,
                 const at::Tensor& gradients, const at::Tensor& ends);

// Joins the paths of the gradients. The sums are
// real and like `sums`.
struct JoinedGradients {
  at::Tensor gradient;      // of the result
  at::Tensor inside;        // of the inputs of later tokens within the chunk, head-major; real
  at::Tensor own_weights;   // of the token's own input
  at::Tensor passed, read;  // keys times gradients of states, and queries times states; group-major
  at::Tensor values;        // out: gradient of the values
  at::Tensor row_sums;      // in and out: share of a token in the decays between it and those before it
  at::Tensor input_sums;    // out: value times gradient of the input
  at::Tensor state_sums;    // out: the part of the input that reaches the next chunk, times its gradient
  at::Tensor skip_sums;     // out: value times gradient of the result
};
void launch_join_backward(const ScanTensors& in, const at::Tensor& sums, const JoinedGradients& joined);

// From these sums to the gradients of steps [batch, length, heads] and, per token, of decay (like sums).
void launch_steps_backward(const ScanTensors& in, const JoinedGradients& joined, const at::Tensor& ends,
                           const at::Tensor& steps, const at::Tensor& decay);

}  // namespace penstock::detail
