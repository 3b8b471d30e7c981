// The kernels of selective_scan.h. Private to this folder.
//
// `real` is the dtype of sums: float64 for float64, otherwise float32. Between chunks, states are stored as
// [batch, chunks, groups, state size, heads of a group * head width], so that the products of a chunk with
// the states of all heads of a group are one matrix product.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::detail {

struct ScanShape {
  std::int64_t batch, length, heads, head_width, groups, state_size, chunk, chunks;

  std::int64_t group_heads() const { return heads / groups; }
  std::int64_t group_width() const { return group_heads() * head_width; }
  std::int64_t inner() const { return heads * head_width; }
};

// `chunk` is at most the length.
ScanShape shape_of_scan(const at::Tensor& values, const at::Tensor& keys, std::int64_t chunk);

// Contiguous; absent tensors are undefined.
struct ScanTensors {
  ScanShape shape;
  at::Tensor values, keys, queries;  // of one dtype
  at::Tensor steps, decay, skip;     // real
  at::Tensor starts;                 // int32 [batch, length]
  at::Tensor initial;                // real, [batch, groups, state size, group width]
};

// Contiguous.
struct ScanOutputs {
  at::Tensor values;  // like the inputs
  at::Tensor states;  // before each chunk, dtype of the values
  at::Tensor last;    // real, [batch, groups, state size, group width]
};

// What backward gets in addition.
struct ScanGradientInputs {
  at::Tensor values;  // gradient of the result, dtype of the values
  at::Tensor last;    // gradient of the last state, real; undefined: zeros
  at::Tensor states;  // before each chunk, from forward
};

// `steps`, `decay`, `skip` and `initial` are real, the others have the dtype of the values. All are
// contiguous.
struct ScanGradients {
  at::Tensor values, steps, decay, keys, queries, skip, initial;
};

// CPU, float32 and float64.
ScanOutputs scan_on_cpu(const ScanTensors& in);
ScanGradients scan_backward_on_cpu(const ScanTensors& in, const ScanGradientInputs& from);

// By batched products of whole tensors and the kernels of scan_device.h. CUDA, also 16-bit.
ScanOutputs scan_batched(const ScanTensors& in);
ScanGradients scan_backward_batched(const ScanTensors& in, const ScanGradientInputs& from);

// Token by token: state [batch, heads, head width, state size] is overwritten; result like the values.
void scan_step_on_cpu(const ScanTensors& in, const at::Tensor& state, const at::Tensor& result);
void scan_step_on_cuda(const ScanTensors& in, const at::Tensor& state, const at::Tensor& result);

}  // namespace penstock::detail
