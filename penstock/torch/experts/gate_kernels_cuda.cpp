// The kernels of expert_gate.h, compiled from text at first use. Deterministic: the sum of a row is computed
// by one warp, in a fixed order.
#include <ATen/ATen.h>

#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <string>

#include "penstock/torch/compat/cuda_text.h"
#include "penstock/torch/experts/expert_kernels.h"

namespace penstock::detail {

namespace {

constexpr unsigned kGateBlock = 256;  // threads
constexpr std::int64_t kGateWarp = 32;

// Rows of `across` packs; the strides of their starts are in packs.
constexpr const char* kGate = R"(
__device__ inline Pack zeros() {
  Pack pack;
  for (int j = 0; j < PACK; ++j) put(pack.at[j], 0);
  return pack;
}
__device__ inline Number sigmoid(Number x) { return (Number)1 / ((Number)1 + exp(-x)); }

extern "C" __global__ void penstock_weighted_gate(const Pack* gate, const Pack* up, const Number* weights, const int* order, Pack* inner, i64 packs, i64 across,
                                                  i64 gate_stride, i64 up_stride) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < packs; i += gridDim.x * (i64)blockDim.x) {
    const i64 slot = i / across, column = i - slot * across;
    const int choice = order[slot];
    if (choice < 0) {
      inner[i] = zeros();
      continue;
    }
    const Number weight = weights[choice];
    const Pack a = gate[slot * gate_stride + column], b = up[slot * up_stride + column];
    Pack product;
    for (int j = 0; j < PACK; ++j) {
      const Number x = number(a.at[j]);
      put(product.at[j], weight * (x * sigmoid(x) * number(b.at[j])));
    }
    inner[i] = product;
  }
}

// One warp per slot. There are as many choices as slots, and the warp also clears the gradient of the choice of
// its own number if that was dropped.
extern "C" __global__ void penstock_weighted_gate_backward(const Pack* gate, const Pack* up, const Number* weights, const int* order, const int* slots,
                                                           const Pack* gradient, Pack* by_gate, Pack* by_up, Number* by_weight, i64 total, i64 across,
                                                           i64 gate_stride, i64 up_stride, i64 result_stride) {
  const i64 warps = gridDim.x * (i64)(blockDim.x / 32);
  const int lane = threadIdx.x % 32;
  for (i64 slot = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32; slot < total; slot += warps) {
    const int choice = order[slot];
    if (lane == 0 && slots[slot] < 0) by_weight[slot] = 0;
    Pack *to_gate = by_gate + slot * result_stride, *to_up = by_up + slot * result_stride;
    if (choice < 0) {
      for (i64 column = lane; column < across; column += 32) to_gate[column] = to_up[column] = zeros();
      continue;
    }
    const Number weight = weights[choice];
    Number sum = 0;
    for (i64 column = lane; column < across; column += 32) {
      const Pack a = gate[slot * gate_stride + column], b = up[slot * up_stride + column], in = gradient[slot * across + column];
      Pack first, second;
      for (int j = 0; j < PACK; ++j) {
        const Number x = number(a.at[j]), share = sigmoid(x), silu = x * share, other = number(b.at[j]), g = number(in.at[j]);
        sum += g * (silu * other);
        put(second.at[j], weight * g * silu);
        put(first.at[j], weight * g * other * (share * ((Number)1 + x * ((Number)1 - share))));
      }
      to_gate[column] = first;
      to_up[column] = second;
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) by_weight[choice] = sum;
  }
}
)";

// The largest pack that divides the rows of all tensors and the distances between them.
std::int64_t gate_pack(std::initializer_list<at::Tensor> rows) {
  std::int64_t run = rows.begin()->size(1);
  for (const at::Tensor& each : rows) run = std::gcd(run, each.stride(0));
  return cuda_pack(run, rows);
}

CudaKernel& gate_kernel(const char* name, at::ScalarType dtype, std::int64_t pack) {
  return text_kernel(name, {kGate}, {{"ELEMENT", cuda_element(dtype)}, {"PACK", std::to_string(pack)}});
}

}  // namespace

void launch_weighted_gate(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                          const at::Tensor& order, const at::Tensor& inner) {
  const std::int64_t pack = gate_pack({gate, up, inner}), packs = inner.numel() / pack;
  const int device = gate.get_device();
  gate_kernel("penstock_weighted_gate", gate.scalar_type(), pack)
      .launch(device, looping_blocks(packs, kGateBlock, device), kGateBlock, device_in(gate), device_in(up),
              device_in(weights), device_in(order), device_out(inner), device_number(packs),
              device_number(gate.size(1) / pack), device_number(gate.stride(0) / pack),
              device_number(up.stride(0) / pack));
}

void launch_weighted_gate_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                                   const at::Tensor& order, const at::Tensor& slot,
                                   const at::Tensor& gradient, const at::Tensor& by_gate,
                                   const at::Tensor& by_up, const at::Tensor& by_weight) {
  const std::int64_t pack = gate_pack({gate, up, gradient, by_gate, by_up});
  const int device = gate.get_device();
  gate_kernel("penstock_weighted_gate_backward", gate.scalar_type(), pack)
      .launch(device, looping_blocks(gate.size(0), kGateBlock / kGateWarp, device), kGateBlock,
              device_in(gate), device_in(up), device_in(weights), device_in(order), device_in(slot),
              device_in(gradient), device_out(by_gate), device_out(by_up), device_out(by_weight),
              device_number(gate.size(0)), device_number(gate.size(1) / pack),
              device_number(gate.stride(0) / pack), device_number(up.stride(0) / pack),
              device_number(by_gate.stride(0) / pack));
}

}  // namespace penstock::detail
