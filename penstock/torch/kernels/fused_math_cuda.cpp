// The kernels of fused_math.h, compiled from text at first use. Elements are loaded sixteen bytes at a time
// if their alignment allows it.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/cuda_kernel.h"
#include "penstock/torch/kernels/fused_math_kernels.h"

namespace penstock::detail {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kRowThreads = 512;  // per row of logits
constexpr std::int64_t kBlocksPerMultiprocessor = 16;

// Shared by the kernels: an element, and a pack of PACK elements.
constexpr const char* kElements = R"(
typedef long long i64;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
struct Float32 { float bits; };
struct BFloat16 { unsigned short bits; };
struct Float16 { unsigned short bits; };

__device__ inline float number(Float32 x) { return x.bits; }
__device__ inline float number(BFloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float number(Float16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}
__device__ inline void put(Float32& to, float x) { to.bits = x; }
__device__ inline void put(BFloat16& to, float x) {  // round to nearest even; NaN stays NaN
  const unsigned bits = __float_as_uint(x);
  to.bits = x != x ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ inline void put(Float16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

struct alignas(sizeof(ELEMENT) * PACK) Pack { ELEMENT at[PACK]; };

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

constexpr const char* kSiluProduct = R"(
extern "C" __global__ void penstock_silu_product(const Pack* gate, const Pack* up, Pack* result, i64 packs) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < packs; i += gridDim.x * (i64)blockDim.x) {
    const Pack a = gate[i], b = up[i];
    Pack product;
    for (int j = 0; j < PACK; ++j) {
      const float x = number(a.at[j]);
      put(product.at[j], x * sigmoid(x) * number(b.at[j]));
    }
    result[i] = product;
  }
}

extern "C" __global__ void penstock_silu_product_backward(const Pack* gate, const Pack* up, const Pack* gradient, Pack* gate_gradient, Pack* up_gradient, i64 packs) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < packs; i += gridDim.x * (i64)blockDim.x) {
    const Pack a = gate[i], b = up[i], g = gradient[i];
    Pack to_gate, to_up;
    for (int j = 0; j < PACK; ++j) {
      const float x = number(a.at[j]), share = sigmoid(x), in = number(g.at[j]);
      put(to_up.at[j], in * (x * share));
      put(to_gate.at[j], in * number(b.at[j]) * (share * (1.0f + x * (1.0f - share))));
    }
    gate_gradient[i] = to_gate;
    up_gradient[i] = to_up;
  }
}
)";

const char* element_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? "Float32" : dtype == at::kBFloat16 ? "BFloat16" : "Float16";
}

// Never destroyed: the driver may shut down before static objects are destroyed.
CudaKernel& kernel_for(const char* name, const char* text, at::ScalarType dtype, std::int64_t pack) {
  static std::mutex& mutex = *new std::mutex;
  static auto& kernels =
      *new std::map<std::tuple<std::string, at::ScalarType, std::int64_t>, std::unique_ptr<CudaKernel>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<CudaKernel>& kernel = kernels[{name, dtype, pack}];
  if (!kernel)
    kernel = std::make_unique<CudaKernel>(
        CudaSource{.name = name,
                   .text = std::string(kElements) + text,
                   .headers = {},
                   .macros = {{"ELEMENT", element_of(dtype)}, {"PACK", std::to_string(pack)}}});
  return *kernel;
}

// Returns the largest pack size, up to sixteen bytes, that divides `run` and to which all tensors are
// aligned.
std::int64_t pack_of(std::int64_t run, std::initializer_list<at::Tensor> tensors) {
  std::int64_t pack = 16 / tensors.begin()->element_size();
  for (; pack > 1; pack /= 2) {
    const auto fits = [&](const at::Tensor& tensor) {
      return reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) %
                 static_cast<std::uintptr_t>(pack * tensor.element_size()) ==
             0;
    };
    if (run % pack == 0 && std::all_of(tensors.begin(), tensors.end(), fits)) return pack;
  }
  return 1;
}

unsigned blocks_for(std::int64_t packs, int device) {
  return static_cast<unsigned>(
      std::min((packs + kThreads - 1) / kThreads, multiprocessors(device) * kBlocksPerMultiprocessor));
}

const void* in(const at::Tensor& tensor) { return tensor.data_ptr(); }
void* out(const at::Tensor& tensor) { return tensor.data_ptr(); }
long long number(std::int64_t value) { return value; }

}  // namespace

bool has_fused_math(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void launch_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored,
                          const at::Tensor& losses, const at::Tensor& log_sums) {
  const std::int64_t pack = pack_of(logits.size(1), {logits});
  kernel_for("penstock_cross_entropy", kCrossEntropy, logits.scalar_type(), pack)
      .launch(logits.get_device(), static_cast<unsigned>(logits.size(0)), kRowThreads, in(logits),
              in(targets), out(losses), out(log_sums), number(logits.size(1) / pack), number(ignored));
}

void launch_cross_entropy_backward(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored,
                                   const at::Tensor& log_sums, const at::Tensor& scale,
                                   const at::Tensor& gradient) {
  const std::int64_t pack = pack_of(logits.size(1), {logits, gradient});
  kernel_for("penstock_cross_entropy_backward", kCrossEntropy, logits.scalar_type(), pack)
      .launch(logits.get_device(), static_cast<unsigned>(logits.size(0)), kRowThreads, in(logits),
              in(targets), in(log_sums), in(scale), out(gradient), number(logits.size(1) / pack),
              number(ignored));
}

void launch_rotate_pairs(const at::Tensor& given, const at::Tensor& turns, bool back,
                         const at::Tensor& result) {
  const std::int64_t width = given.size(3);
  PENSTOCK_INVARIANT(width % 2 == 0, "a head of odd width has no pairs");
  // Tokens with turns of their own: those of one row, which all rows share, or those of all rows.
  const std::int64_t places = turns.numel() / width;
  // A shard that starts in the middle of a pair is copied; new allocations are aligned.
  const at::Tensor x = pack_of(width, {given, result}) > 1 ? given : given.clone();
  const std::int64_t pack = pack_of(width, {x, result});
  const std::int64_t packs = x.numel() / pack;
  kernel_for("penstock_rotate_pairs", kRotatePairs, x.scalar_type(), pack)
      .launch(x.get_device(), blocks_for(packs, x.get_device()), kThreads, in(x), in(turns), out(result),
              number(packs), number(places), number(x.size(2)), number(width / pack), back ? -1.0F : 1.0F);
}

void launch_silu_product(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& result) {
  const std::int64_t pack = pack_of(gate.numel(), {gate, up, result});
  const std::int64_t packs = gate.numel() / pack;
  kernel_for("penstock_silu_product", kSiluProduct, gate.scalar_type(), pack)
      .launch(gate.get_device(), blocks_for(packs, gate.get_device()), kThreads, in(gate), in(up),
              out(result), number(packs));
}

void launch_silu_product_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& gradient,
                                  const at::Tensor& gate_gradient, const at::Tensor& up_gradient) {
  const std::int64_t pack = pack_of(gate.numel(), {gate, up, gradient, gate_gradient, up_gradient});
  const std::int64_t packs = gate.numel() / pack;
  kernel_for("penstock_silu_product_backward", kSiluProduct, gate.scalar_type(), pack)
      .launch(gate.get_device(), blocks_for(packs, gate.get_device()), kThreads, in(gate), in(up),
              in(gradient), out(gate_gradient), out(up_gradient), number(packs));
}

}  // namespace penstock::detail
