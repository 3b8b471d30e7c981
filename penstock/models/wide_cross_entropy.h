// Cross entropy of 16-bit logits over a large vocabulary, with little traffic: a block of rows at a time is widened to float32, and its
// gradient is computed in the same pass and kept in 16 bits. The usual way keeps two float32 copies of all logits, and reads and writes
// them several times more; for 32 x 1024 tokens and 50,304 entries that is 13 GB and a sixth of a training step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::models {

// Sum over the rows whose target counts, float32, without dims. logits [rows, vocabulary] of 16 bits, targets [rows] Long; other
// gradients of it than of the first order are refused. No function here waits for the device.
at::Tensor wide_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored);

}  // namespace penstock::models
