// Transformer operators that LibTorch computes in many passes over memory. On a GPU each is a single
// kernel here, forward and backward, and a dispatcher operator (penstock::silu_product ...), so that modes
// see it and captured graphs contain it. Elsewhere, and for tensor subclasses that are not fake, LibTorch's
// operators are used.
//
//   // logits [rows, classes] of any floating dtype, targets [rows]
//   loss = cross_entropy_sum(logits, targets, -100);
//   q = rotate_pairs(q, turns);                           // rotary positions
//   y = silu_product(gate, up);                           // silu(gate) * up
//
// All compute in float32 (float64 for float64) and round once to the dtype of their input. The float32 values
// that LibTorch would save for backward are not saved: backward reads the inputs again. On a GPU a second
// derivative is an error (once_differentiable.h), but for rotate_pairs.
// Thread safety: as for tensors. Nothing waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

// Sum over the rows of -log softmax(row)[target], in float32 (float64 for float64); rows whose target is
// `ignored` do not contribute. On a GPU a target outside of the classes makes the loss NaN; elsewhere
// LibTorch throws.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored);

// x [batch, length, heads, 2n]: each pair of neighbouring elements is a complex number, multiplied by turns
// [length, 1, n], or [batch, length, 1, n] if rows have tokens at different positions (ComplexFloat;
// ComplexDouble for float64).
at::Tensor rotate_pairs(const at::Tensor& x, const at::Tensor& turns);

// Rows of a larger tensor, as split() gives them, are not copied. Keeps its inputs for backward, and nothing
// else.
at::Tensor silu_product(const at::Tensor& gate, const at::Tensor& up);
// The same of the two halves of each row: [n, 2 * width] -> [n, width]. The gradient is one tensor, too.
// Throws ValueError for rows of an odd width.
at::Tensor silu_halves(const at::Tensor& joint);

}  // namespace penstock
