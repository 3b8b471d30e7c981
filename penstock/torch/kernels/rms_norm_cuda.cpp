// Root mean square normalization on a GPU, compiled from text at first use. A team of TEAM threads computes a
// row: each of them holds PACKS packs of PACK elements in registers, so that a row is read once.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "penstock/torch/compat/cuda_text.h"
#include "penstock/torch/kernels/rms_norm_kernels.h"

namespace penstock::detail {
namespace {

constexpr std::int64_t kMostHeld = 32;  // elements of a thread; backward holds three times as many
constexpr std::int64_t kMostTeam = 512;
constexpr std::int64_t kSmallBlock = 128;  // threads of a block of teams that are warps
constexpr std::int64_t kTeamsPerMultiprocessor = 16;

constexpr const char* kNorm = R"(
template <class Element> struct alignas(sizeof(Element) * PACK) PackOf { Element at[PACK]; };
typedef PackOf<IN> InPack;
typedef PackOf<OUT> OutPack;
typedef PackOf<Float32> WeightPack;

// The sum over a team, in a fixed order. All threads of a block call it equally often.
__device__ inline float team_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
#if TEAM > 32
  __shared__ float warps[TEAM / 32];
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < TEAM / 32; ++i) x += warps[i];
#endif
  return x;
}

extern "C" __global__ void penstock_rms_norm(const InPack* x, const WeightPack* weight, OutPack* y, float* scales, i64 rows, i64 packs, float epsilon) {
  const int member = threadIdx.x % TEAM;
  const i64 teams = gridDim.x * (i64)(blockDim.x / TEAM);
  for (i64 row = blockIdx.x * (i64)(blockDim.x / TEAM) + threadIdx.x / TEAM; row < rows; row += teams) {
    float held[PACKS][PACK], sum = 0;
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const i64 column = k * TEAM + member;
      if (column >= packs) continue;
      const InPack pack = x[row * packs + column];
      for (int j = 0; j < PACK; ++j) {
        held[k][j] = number(pack.at[j]);
        sum += held[k][j] * held[k][j];
      }
    }
    const float scale = 1.0f / sqrtf(team_sum(sum) / (float)(packs * PACK) + epsilon);
    if (member == 0) scales[row] = scale;
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const i64 column = k * TEAM + member;
      if (column >= packs) continue;
      const WeightPack w = weight[column];
      OutPack result;
      for (int j = 0; j < PACK; ++j) put(result.at[j], held[k][j] * scale * number(w.at[j]));
      y[row * packs + column] = result;
    }
  }
}

// With g = gradient * weight: gradient of x = scale * (g - x * scale^2 * mean(g * x)). Each team adds up the
// gradient of the weight over its rows.
extern "C" __global__ void penstock_rms_norm_backward(const OutPack* gradient, const InPack* x, const WeightPack* weight, const float* scales, InPack* x_gradient,
                                                      WeightPack* weight_gradients, i64 rows, i64 packs) {
  const int member = threadIdx.x % TEAM;
  const i64 teams = gridDim.x * (i64)(blockDim.x / TEAM), team = blockIdx.x * (i64)(blockDim.x / TEAM) + threadIdx.x / TEAM;
  float sums[PACKS][PACK];
  for (int k = 0; k < PACKS; ++k)
    for (int j = 0; j < PACK; ++j) sums[k][j] = 0;
  // Every team of a block takes part in each round, because team_sum() may synchronize the block.
  for (i64 round = 0; round * teams < rows; ++round) {
    const i64 row = round * teams + team;
    const bool exists = row < rows;
    const float scale = exists ? scales[row] : 0;
    float held[PACKS][PACK], g[PACKS][PACK], product = 0;
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const i64 column = k * TEAM + member;
      if (!exists || column >= packs) continue;
      const InPack pack = x[row * packs + column];
      const OutPack in = gradient[row * packs + column];
      const WeightPack w = weight[column];
      for (int j = 0; j < PACK; ++j) {
        held[k][j] = number(pack.at[j]);
        sums[k][j] += number(in.at[j]) * held[k][j] * scale;
        g[k][j] = number(in.at[j]) * number(w.at[j]);
        product += g[k][j] * held[k][j];
      }
    }
    const float factor = team_sum(product) / (float)(packs * PACK) * scale * scale;
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const i64 column = k * TEAM + member;
      if (!exists || column >= packs) continue;
      InPack result;
      for (int j = 0; j < PACK; ++j) put(result.at[j], scale * (g[k][j] - held[k][j] * factor));
      x_gradient[row * packs + column] = result;
    }
  }
  for (int k = 0; k < PACKS; ++k) {
    const i64 column = k * TEAM + member;
    if (column >= packs) continue;
    WeightPack result;
    for (int j = 0; j < PACK; ++j) put(result.at[j], sums[k][j]);
    weight_gradients[team * packs + column] = result;
  }
}
)";

// How rows of this width are divided among threads.
struct Teams {
  std::int64_t pack, packs, members, held, per_block, blocks;

  Teams(std::int64_t rows, std::int64_t width, std::int64_t most, int device,
        std::initializer_list<at::Tensor> tensors)
      : pack(cuda_pack(width, most, tensors)), packs(width / pack), members(32) {
    while (members < kMostTeam && members * (kMostHeld / pack) < packs) members *= 2;
    held = (packs + members - 1) / members;
    per_block = members > 32 ? 1 : kSmallBlock / members;
    blocks =
        std::min((rows + per_block - 1) / per_block,
                 std::max<std::int64_t>(1, multiprocessors(device) * kTeamsPerMultiprocessor / per_block));
  }
  unsigned threads() const { return static_cast<unsigned>(members * per_block); }
  CudaKernel& kernel(const char* name, at::ScalarType in, at::ScalarType out) const {
    return text_kernel(name, {kNorm},
                       {{"IN", cuda_element(in)},
                        {"OUT", cuda_element(out)},
                        {"PACK", std::to_string(pack)},
                        {"PACKS", std::to_string(held)},
                        {"TEAM", std::to_string(members)}});
  }
};

// Sixteen bytes of the wider of both.
std::int64_t most_packed(const at::Tensor& x, const at::Tensor& y) {
  return 16 / std::max(x.element_size(), y.element_size());
}

bool is_norm_dtype(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

}  // namespace

bool has_norm_kernels(const at::Tensor& x, const at::Tensor& weight) {
  return is_norm_dtype(x) && is_norm_dtype(weight) && x.size(-1) <= kMostTeam * kMostHeld;
}

void launch_rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon, const at::Tensor& y,
                     const at::Tensor& scales) {
  const int device = x.get_device();
  const Teams teams(x.size(0), x.size(1), most_packed(x, y), device, {x, weight, y});
  teams.kernel("penstock_rms_norm", x.scalar_type(), y.scalar_type())
      .launch(device, static_cast<unsigned>(teams.blocks), teams.threads(), device_in(x), device_in(weight),
              device_out(y), device_out(scales), device_number(x.size(0)), device_number(teams.packs),
              static_cast<float>(epsilon));
}

at::Tensor launch_rms_norm_backward(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
                                    const at::Tensor& scales, const at::Tensor& x_gradient) {
  const int device = x.get_device();
  const Teams teams(x.size(0), x.size(1), most_packed(x, gradient), device,
                    {x, weight, gradient, x_gradient});
  const at::Tensor weight_gradients =
      at::empty({teams.blocks * teams.per_block, x.size(1)}, weight.options());
  teams.kernel("penstock_rms_norm_backward", x.scalar_type(), gradient.scalar_type())
      .launch(device, static_cast<unsigned>(teams.blocks), teams.threads(), device_in(gradient), device_in(x),
              device_in(weight), device_in(scales), device_out(x_gradient), device_out(weight_gradients),
              device_number(x.size(0)), device_number(teams.packs));
  return weight_gradients.sum(0);
}

}  // namespace penstock::detail
