// Three operators of transformers that LibTorch computes in many passes over memory. On a GPU each is one kernel here, forward and
// backward, and an operator of the dispatcher (penstock::silu_product ...), so that modes see it and captured graphs hold it; everywhere
// else, and for subclasses that are not fake, they are LibTorch's operators.
//
//   loss = cross_entropy_sum(logits, targets, -100);      // logits [rows, classes] of any floating dtype, targets [rows]
//   q = rotate_pairs(q, turns);                           // rotary positions
//   y = silu_product(gate, up);                           // silu(gate) * up
//
// All of them compute in float32 (float64 for float64) and round once to the dtype of their input. What LibTorch would keep for backward in
// float32 is not kept: the backward reads the inputs again. Differentiable once on a GPU.
// Thread rule: as for tensors; nothing waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

// Sum over the rows of -log softmax(row)[target], in float32 (float64 for float64); rows whose target is `ignored` count nothing. On a GPU
// a target outside of the classes makes the loss NaN; elsewhere it is LibTorch's error.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored);

// x [batch, length, heads, 2n]: neighbouring elements are points of the plane, multiplied by the complex numbers turns [length, 1, n]
// (ComplexFloat; ComplexDouble for float64).
at::Tensor rotate_pairs(const at::Tensor& x, const at::Tensor& turns);

at::Tensor silu_product(const at::Tensor& gate, const at::Tensor& up);

}  // namespace penstock
