// The selective state-space scan of the Mamba-2 family. Head h has a state S [head width, state size]:
//
//   S_t = exp(step_t * decay_h) * S_(t-1) + step_t * value_t (outer product) key_t
//   y_t = S_t query_t + skip_h * value_t
//
//   SelectiveScan scan{.values = x, .steps = dt, .decay = a, .keys = b, .queries = c, .skip = d};
//   auto [y, state] = selective_scan(scan);          // a whole row
//   auto [next, after] = selective_scan_step(token, state);   // and one more token
//
// Head h uses the keys and queries of group h / (heads / groups). Where the document changes from one token
// to the next (document_starts.h), the state is zero before the next token. The first token continues from
// the initial state.
//
// Tokens are computed in chunks by matrix products: within a chunk by the products of queries and keys,
// weighted with the decay between the two tokens; between chunks through the states, which are passed on.
// Time and memory are linear in the length; the weights exist for one chunk at a time (CPU) or as
// batch * heads * length * chunk elements (CUDA). Backward computes them again from the inputs and the states
// between chunks. Decays are products of numbers up to 1 or exponentials of differences within a chunk, so
// nothing overflows. The last chunk may be shorter.
//
// Dispatcher operators penstock::selective_scan and penstock::selective_scan_backward, with kernels for the
// CPU, CUDA and shapes only. 16-bit inputs: on the CPU everything is float32; on CUDA products have 16-bit
// operands and float32 sums; decays, states that are passed on, and gradients of steps are float32.
// Differentiable once, with respect to all floating-point inputs; a second derivative is an error
// (once_differentiable.h).
// Thread safety: as for tensors. Nothing waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

struct SelectiveScan {
  at::Tensor values;              // [batch, length, heads, head width]
  at::Tensor steps;               // [batch, length, heads], positive
  at::Tensor decay;               // [heads], negative
  at::Tensor keys, queries;       // [batch, length, groups, state size]
  at::Tensor skip;                // [heads]
  at::Tensor documents = {};      // integers [batch, length]
  at::Tensor initial_state = {};  // [batch, heads, head width, state size]; undefined: zeros
  std::int64_t chunk = 128;       // tokens per chunk
};

struct ScanResult {
  at::Tensor values;  // [batch, length, heads, head width], dtype of the values
  at::Tensor state;   // after the last token: [batch, heads, head width, state size], float32 (or float64)
};

// Throws ValueError for shapes that do not fit, naming the argument.
ScanResult selective_scan(const SelectiveScan& scan);

// The same for a few tokens that follow `scan.initial_state`, which must be defined: token by token, in one
// pass over the state, without gradients and documents. Equals selective_scan up to rounding.
ScanResult selective_scan_step(const SelectiveScan& scan);

}  // namespace penstock
