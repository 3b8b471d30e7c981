// The kernels of fused_math.h, compiled from text at first use. Elements are loaded sixteen bytes at a time
// if their alignment allows it.
#include <ATen/ATen.h>

#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/cuda_text.h"
#include "penstock/torch/kernels/fused_math_kernels.h"

namespace penstock::detail {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kRowThreads = 512;  // per row of logits

constexpr const char* kSigmoid = R"(
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
)";

constexpr const char* kCrossEntropy = R"(
// Running maximum and sum of exp(value - maximum) of a thread, a warp or a block.
struct Sum { float top, sum; };
__device__ inline Sum join(Sum a, Sum b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {top, 0.0f};
  return {top, a.sum * expf(a.top - top) + b.sum * expf(b.top - top)};
}

extern "C" __global__ void penstock_cross_entropy(const Pack* logits, const i64* targets, float* losses, float* log_sums, i64 packs, i64 ignored) {
  const i64 row = blockIdx.x;
  const Pack* values = logits + row * packs;
  Sum mine = {-INFINITY, 0.0f};
  for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack pack = values[i];
    float top = mine.top;
    for (int j = 0; j < PACK; ++j) top = fmaxf(top, number(pack.at[j]));
    if (top == -INFINITY) continue;
    float sum = mine.sum * expf(mine.top - top);
    for (int j = 0; j < PACK; ++j) sum += expf(number(pack.at[j]) - top);
    mine = {top, sum};
  }
  for (int offset = 16; offset > 0; offset /= 2)
    mine = join(mine, {__shfl_xor_sync(~0u, mine.top, offset), __shfl_xor_sync(~0u, mine.sum, offset)});
  __shared__ Sum warps[32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < blockDim.x / 32; ++i) mine = join(mine, warps[i]);
  const float log_sum = mine.top + logf(mine.sum);
  const i64 target = targets[row];
  log_sums[row] = log_sum;
  const bool outside = target < 0 || target >= packs * PACK;
  losses[row] = target == ignored ? 0.0f : outside ? NAN : log_sum - number(((const ELEMENT*)values)[target]);
}

extern "C" __global__ void penstock_cross_entropy_backward(const Pack* logits, const i64* targets, const float* log_sums, const float* scale, Pack* gradients, i64 packs,
                                                           i64 ignored) {
  const i64 row = blockIdx.x;
  const i64 target = targets[row];
  const float factor = *scale, log_sum = log_sums[row];
  for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack result;
    if (target == ignored) {
      for (int j = 0; j < PACK; ++j) put(result.at[j], 0.0f);
    } else {
      const Pack pack = logits[row * packs + i];
      for (int j = 0; j < PACK; ++j) {
        const float share = expf(number(pack.at[j]) - log_sum);
        put(result.at[j], factor * (i * PACK + j == target ? share - 1.0f : share));
      }
    }
    gradients[row * packs + i] = result;
  }
}
)";

// A pack holds whole complex numbers; PACK is even.
constexpr const char* kRotatePairs = R"(
extern "C" __global__ void penstock_rotate_pairs(const Pack* x, const float2* turns, Pack* result, i64 packs, i64 places, i64 heads, i64 packs_of_head, float sign) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < packs; i += gridDim.x * (i64)blockDim.x) {
    const i64 within = i % packs_of_head, place = i / packs_of_head / heads % places;
    const float2* turn = turns + (place * packs_of_head + within) * (PACK / 2);
    const Pack pack = x[i];
    Pack turned;
    for (int j = 0; j < PACK / 2; ++j) {
      const float a = number(pack.at[2 * j]), b = number(pack.at[2 * j + 1]), c = turn[j].x, s = sign * turn[j].y;
      put(turned.at[2 * j], a * c - b * s);
      put(turned.at[2 * j + 1], a * s + b * c);
    }
    result[i] = turned;
  }
}
)";

// Rows of `across` packs; the strides of their starts are in packs.
constexpr const char* kSiluProduct = R"(
extern "C" __global__ void penstock_silu_product(const Pack* gate, const Pack* up, Pack* result, i64 packs, i64 across, i64 gate_stride, i64 up_stride) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < packs; i += gridDim.x * (i64)blockDim.x) {
    const i64 row = i / across, column = i - row * across;
    const Pack a = gate[row * gate_stride + column], b = up[row * up_stride + column];
    Pack product;
    for (int j = 0; j < PACK; ++j) {
      const float x = number(a.at[j]);
      put(product.at[j], x * sigmoid(x) * number(b.at[j]));
    }
    result[i] = product;
  }
}

extern "C" __global__ void penstock_silu_product_backward(const Pack* gate, const Pack* up, const Pack* gradient, Pack* gate_gradient, Pack* up_gradient, i64 packs,
                                                          i64 across, i64 gate_stride, i64 up_stride, i64 result_stride) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < packs; i += gridDim.x * (i64)blockDim.x) {
    const i64 row = i / across, column = i - row * across, place = row * result_stride + column;
    const Pack a = gate[row * gate_stride + column], b = up[row * up_stride + column], g = gradient[i];
    Pack to_gate, to_up;
    for (int j = 0; j < PACK; ++j) {
      const float x = number(a.at[j]), share = sigmoid(x), in = number(g.at[j]);
      put(to_up.at[j], in * (x * share));
      put(to_gate.at[j], in * number(b.at[j]) * (share * (1.0f + x * (1.0f - share))));
    }
    gate_gradient[place] = to_gate;
    up_gradient[place] = to_up;
  }
}
)";

// The largest pack that divides the rows of all tensors and the distances between them.
std::int64_t row_pack(std::initializer_list<at::Tensor> rows) {
  std::int64_t run = rows.begin()->size(1);
  for (const at::Tensor& each : rows) run = std::gcd(run, each.stride(0));
  return cuda_pack(run, rows);
}

CudaKernel& kernel_for(const char* name, const char* text, at::ScalarType dtype, std::int64_t pack) {
  return text_kernel(name, {kSigmoid, text},
                     {{"ELEMENT", cuda_element(dtype)}, {"PACK", std::to_string(pack)}});
}

unsigned blocks_for(std::int64_t packs, int device) { return looping_blocks(packs, kThreads, device); }

}  // namespace

bool has_fused_math(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void launch_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored,
                          const at::Tensor& losses, const at::Tensor& log_sums) {
  const std::int64_t pack = cuda_pack(logits.size(1), {logits});
  kernel_for("penstock_cross_entropy", kCrossEntropy, logits.scalar_type(), pack)
      .launch(logits.get_device(), static_cast<unsigned>(logits.size(0)), kRowThreads, device_in(logits),
              device_in(targets), device_out(losses), device_out(log_sums),
              device_number(logits.size(1) / pack), device_number(ignored));
}

void launch_cross_entropy_backward(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored,
                                   const at::Tensor& log_sums, const at::Tensor& scale,
                                   const at::Tensor& gradient) {
  const std::int64_t pack = cuda_pack(logits.size(1), {logits, gradient});
  kernel_for("penstock_cross_entropy_backward", kCrossEntropy, logits.scalar_type(), pack)
      .launch(logits.get_device(), static_cast<unsigned>(logits.size(0)), kRowThreads, device_in(logits),
              device_in(targets), device_in(log_sums), device_in(scale), device_out(gradient),
              device_number(logits.size(1) / pack), device_number(ignored));
}

void launch_rotate_pairs(const at::Tensor& given, const at::Tensor& turns, bool back,
                         const at::Tensor& result) {
  const std::int64_t width = given.size(3);
  PENSTOCK_INVARIANT(width % 2 == 0, "a head of odd width has no pairs");
  // Tokens with turns of their own: those of one row, which all rows share, or those of all rows.
  const std::int64_t places = turns.numel() / width;
  // A shard that starts in the middle of a pair is copied; new allocations are aligned.
  const at::Tensor x = cuda_pack(width, {given, result}) > 1 ? given : given.clone();
  const std::int64_t pack = cuda_pack(width, {x, result});
  const std::int64_t packs = x.numel() / pack;
  kernel_for("penstock_rotate_pairs", kRotatePairs, x.scalar_type(), pack)
      .launch(x.get_device(), blocks_for(packs, x.get_device()), kThreads, device_in(x), device_in(turns),
              device_out(result), device_number(packs), device_number(places), device_number(x.size(2)),
              device_number(width / pack), back ? -1.0F : 1.0F);
}

void launch_silu_product(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& result) {
  const std::int64_t pack = row_pack({gate, up, result}), packs = result.numel() / pack;
  kernel_for("penstock_silu_product", kSiluProduct, gate.scalar_type(), pack)
      .launch(gate.get_device(), blocks_for(packs, gate.get_device()), kThreads, device_in(gate),
              device_in(up), device_out(result), device_number(packs), device_number(gate.size(1) / pack),
              device_number(gate.stride(0) / pack), device_number(up.stride(0) / pack));
}

void launch_silu_product_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& gradient,
                                  const at::Tensor& gate_gradient, const at::Tensor& up_gradient) {
  const std::int64_t pack = row_pack({gate, up, gradient, gate_gradient, up_gradient}),
                     packs = gradient.numel() / pack;
  kernel_for("penstock_silu_product_backward", kSiluProduct, gate.scalar_type(), pack)
      .launch(gate.get_device(), blocks_for(packs, gate.get_device()), kThreads, device_in(gate),
              device_in(up), device_in(gradient), device_out(gate_gradient), device_out(up_gradient),
              device_number(packs), device_number(gate.size(1) / pack), device_number(gate.stride(0) / pack),
              device_number(up.stride(0) / pack), device_number(gate_gradient.stride(0) / pack));
}

}  // namespace penstock::detail
