// The router's choice on a GPU, compiled from text at first use. A warp computes a token and holds its logits
// in registers, PER in each lane; it goes through many tokens and adds up their scores and squares.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "penstock/torch/compat/cuda_text.h"
#include "penstock/torch/experts/expert_kernels.h"

namespace penstock::detail {
namespace {

constexpr std::int64_t kMostRouted = 1024;  // experts
constexpr std::int64_t kRouterWarps = 8;    // of a block
constexpr std::int64_t kRouterBlocks = 4;   // of a multiprocessor

constexpr const char* kRouter = R"(
__device__ inline Number warp_sum(Number x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// The logits of a token and what follows from them.
struct Logits {
  Number logit[PER], share[PER];  // share: softmax
  Number top, sum;                // the highest, and the sum of exp(logit - top)

  __device__ Logits(const ELEMENT* row, int experts, int lane) {
    top = -INFINITY;
    #pragma unroll
    for (int k = 0; k < PER; ++k) {
      const int expert = k * 32 + lane;
      logit[k] = expert < experts ? number(row[expert]) : (Number)-INFINITY;
      top = logit[k] > top || logit[k] != logit[k] ? logit[k] : top;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      const Number other = __shfl_xor_sync(~0u, top, offset);
      top = other > top || other != other ? other : top;  // NaN stays
    }
    Number mine = 0;
    #pragma unroll
    for (int k = 0; k < PER; ++k) {
      share[k] = k * 32 + lane < experts ? power(logit[k] - top) : (Number)0;
      mine += share[k];
    }
    sum = warp_sum(mine);
    #pragma unroll
    for (int k = 0; k < PER; ++k) share[k] /= sum;
  }
  __device__ Number log_sum() const { return top + logarithm(sum); }
  __device__ Number score_of(Number value) const {
    return SIGMOID ? (Number)1 / ((Number)1 + power(-value)) : power(value - top) / sum;
  }
  __device__ Number score(int k) const { return SIGMOID ? score_of(logit[k]) : share[k]; }
};

extern "C" __global__ void penstock_route_tokens(const ELEMENT* logits, const ELEMENT* bias, i64* choices, ELEMENT* weights, ELEMENT* sums, i64 tokens, int experts,
                                                 int count) {
  const int lane = threadIdx.x % 32;
  const i64 warps = gridDim.x * (i64)(blockDim.x / 32), warp = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32;
  Number score_sums[PER], squares = 0;
  for (int k = 0; k < PER; ++k) score_sums[k] = 0;
  for (i64 token = warp; token < tokens; token += warps) {
    const Logits in(logits + token * experts, experts, lane);
    Number rank[PER];
    #pragma unroll
    for (int k = 0; k < PER; ++k) {
      const int expert = k * 32 + lane;
      if (expert < experts) score_sums[k] += in.score(k);
      rank[k] = expert < experts ? in.score(k) + (bias ? number(bias[expert]) : (Number)0) : (Number)-INFINITY;
      if (rank[k] != rank[k]) rank[k] = -INFINITY;
    }
    const Number log_sum = in.log_sum();
    squares += log_sum * log_sum;
    // The next choice is the best of those after the last one in the order "higher rank, then lower index".
    Number last = INFINITY, total = 0;
    int last_index = -1;
    for (int j = 0; j < count; ++j) {
      Number best = -INFINITY, score = 0;
      int index = 0x7fffffff;
      #pragma unroll
      for (int k = 0; k < PER; ++k) {
        const int expert = k * 32 + lane;
        const bool after = expert < experts && (rank[k] < last || (rank[k] == last && expert > last_index));
        if (after && (rank[k] > best || (rank[k] == best && expert < index))) {
          best = rank[k];
          score = in.score(k);
          index = expert;
        }
      }
      for (int offset = 16; offset > 0; offset /= 2) {
        const Number other = __shfl_xor_sync(~0u, best, offset), other_score = __shfl_xor_sync(~0u, score, offset);
        const int other_index = __shfl_xor_sync(~0u, index, offset);
        if (other > best || (other == best && other_index < index)) {
          best = other;
          score = other_score;
          index = other_index;
        }
      }
      if (lane == 0) {
        choices[token * count + j] = index;
        put(weights[token * count + j], score);
      }
      total += score;
      last = best;
      last_index = index;
    }
    if (NORMALIZE && lane == 0)
      for (int j = 0; j < count; ++j) {
        ELEMENT& weight = weights[token * count + j];
        put(weight, number(weight) / (total + (Number)LEAST_SUM));
      }
  }
  for (int k = 0; k < PER; ++k)
    if (k * 32 + lane < experts) put(sums[warp * (experts + 1) + k * 32 + lane], score_sums[k]);
  if (lane == 0) put(sums[warp * (experts + 1) + experts], squares);
}

extern "C" __global__ void penstock_route_tokens_backward(const ELEMENT* logits, const i64* choices, const ELEMENT* by_weights, const ELEMENT* by_means, ELEMENT* result,
                                                          i64 tokens, int experts, int count) {
  const int lane = threadIdx.x % 32;
  const i64 warps = gridDim.x * (i64)(blockDim.x / 32);
  const Number by_square = number(by_means[experts]) * (Number)2 / (Number)tokens;
  for (i64 token = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32; token < tokens; token += warps) {
    const ELEMENT* row = logits + token * experts;
    const Logits in(row, experts, lane);
    const i64* chosen = choices + token * count;
    const ELEMENT* by_chosen = by_weights + token * count;
    Number total = 0, mean = 0;
    if (NORMALIZE) {
      for (int j = 0; j < count; ++j) {
        const Number score = in.score_of(number(row[chosen[j]]));
        total += score;
        mean += number(by_chosen[j]) * score;
      }
      total += (Number)LEAST_SUM;
      mean /= total;
    }
    Number by_score[PER], product = 0;
    #pragma unroll
    for (int k = 0; k < PER; ++k) {
      const int expert = k * 32 + lane;
      by_score[k] = 0;
      if (expert >= experts) continue;
      by_score[k] = number(by_means[expert]) / (Number)tokens;
      for (int j = 0; j < count; ++j)
        if (chosen[j] == expert) by_score[k] += NORMALIZE ? (number(by_chosen[j]) - mean) / total : number(by_chosen[j]);
      product += by_score[k] * in.score(k);
    }
    if (!SIGMOID) product = warp_sum(product);
    const Number log_sum = in.log_sum();
    #pragma unroll
    for (int k = 0; k < PER; ++k) {
      const int expert = k * 32 + lane;
      if (expert >= experts) continue;
      const Number score = in.score(k), own = SIGMOID ? by_score[k] * score * ((Number)1 - score) : score * (by_score[k] - product);
      put(result[token * experts + expert], own + by_square * log_sum * in.share[k]);
    }
  }
}
)";

CudaKernel& router_kernel(const char* name, const at::Tensor& logits, bool sigmoid, bool normalize) {
  return text_kernel(name, {kRouter},
                     {{"ELEMENT", cuda_element(logits.scalar_type())},
                      {"PER", std::to_string((logits.size(1) + 31) / 32)},
                      {"SIGMOID", sigmoid ? "true" : "false"},
                      {"NORMALIZE", normalize ? "true" : "false"},
                      {"LEAST_SUM", "1e-20"}});
}

unsigned router_blocks(const at::Tensor& logits) {
  return static_cast<unsigned>(std::min((logits.size(0) + kRouterWarps - 1) / kRouterWarps,
                                        multiprocessors(logits.get_device()) * kRouterBlocks));
}

}  // namespace

bool routes_on_device(std::int64_t experts) { return experts <= kMostRouted; }

at::Tensor launch_route_tokens(const at::Tensor& logits, const at::Tensor& bias, bool sigmoid, bool normalize,
                               const at::Tensor& choices, const at::Tensor& weights) {
  const unsigned blocks = router_blocks(logits);
  const at::Tensor sums = at::empty({blocks * kRouterWarps, logits.size(1) + 1}, logits.options());
  router_kernel("penstock_route_tokens", logits, sigmoid, normalize)
      .launch(logits.get_device(), blocks, static_cast<unsigned>(32 * kRouterWarps), device_in(logits),
              device_in(bias), device_out(choices), device_out(weights), device_out(sums),
              device_number(logits.size(0)), static_cast<int>(logits.size(1)),
              static_cast<int>(choices.size(1)));
  return sums.sum(0);
}

void launch_route_tokens_backward(const at::Tensor& logits, const at::Tensor& choices,
                                  const at::Tensor& by_weights, const at::Tensor& by_means, bool sigmoid,
                                  bool normalize, const at::Tensor& result) {
  router_kernel("penstock_route_tokens_backward", logits, sigmoid, normalize)
      .launch(logits.get_device(), router_blocks(logits), static_cast<unsigned>(32 * kRouterWarps),
              device_in(logits), device_in(choices), device_in(by_weights), device_in(by_means),
              device_out(result), device_number(logits.size(0)), static_cast<int>(logits.size(1)),
              static_cast<int>(choices.size(1)));
}

}  // namespace penstock::detail
