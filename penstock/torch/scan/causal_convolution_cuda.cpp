// The convolution on a GPU, compiled from text at first use. A thread computes PACK channels of TILE tokens
// one after another and keeps the last inputs in registers, so that every input is read once per tile.
#include <ATen/ATen.h>

#include <cstdint>
#include <initializer_list>

#include "penstock/torch/scan/causal_convolution_kernels.h"
#include "penstock/torch/scan/scan_kernel.h"

namespace penstock::detail {
namespace {

constexpr unsigned kConvolutionThreads = 256;
constexpr std::int64_t kTileTokens = 32;
constexpr std::int64_t kMostChannels = 4;  // of a thread: taps times channels are kept in registers

constexpr const char* kConvolution = R"(
struct Rows { i64 batch, length, channels, batch_stride, token_stride; };

// The channels and tokens of one thread.
struct Part {
  i64 row, begin, end, channel, tile;
  bool exists;
  __device__ Part(const Rows& rows) {
    const i64 packs = rows.channels / PACK, tiles = (rows.length + TILE - 1) / TILE;
    const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    exists = i < rows.batch * tiles * packs;
    channel = i % packs * PACK;
    tile = i / packs;  // over the whole batch
    row = tile / tiles;
    begin = tile % tiles * TILE;
    end = begin + TILE < rows.length ? begin + TILE : rows.length;
  }
};

// Weights of a thread, and the inputs of the tokens [token - TAPS + 1, token].
struct Window {
  REAL weight[TAPS][PACK], bias[PACK], seen[TAPS][PACK];
  const ELEMENT* x;
  const int* starts;
  i64 stride, length;

  __device__ Window(const Rows& rows, const Part& part, const ELEMENT* inputs, const REAL* weights, const REAL* biases, const int* all_starts) {
    x = inputs + part.row * rows.batch_stride + part.channel;
    starts = all_starts ? all_starts + part.row * rows.length : nullptr;
    stride = rows.token_stride;
    length = rows.length;
    for (int j = 0; j < PACK; ++j) {
      bias[j] = biases ? biases[part.channel + j] : REAL(0);
      for (int k = 0; k < TAPS; ++k) weight[k][j] = weights[(part.channel + j) * TAPS + k];
    }
    for (int k = 0; k < TAPS; ++k) load(part.begin - TAPS + k, k);
  }
  __device__ void load(i64 token, int k) {  // tokens outside of the row are zero
    if (token < 0 || token >= length) {
      for (int j = 0; j < PACK; ++j) seen[k][j] = 0;
      return;
    }
    const Pack pack = *(const Pack*)(x + token * stride);
    for (int j = 0; j < PACK; ++j) seen[k][j] = number(pack.at[j]);
  }
  __device__ void move_to(i64 token) {
    for (int k = 0; k + 1 < TAPS; ++k)
      for (int j = 0; j < PACK; ++j) seen[k][j] = seen[k + 1][j];
    load(token, TAPS - 1);
  }
  // Whether tap k of a token is in its document.
  __device__ bool counts(i64 token, int k) const { return !starts || token - (TAPS - 1) + k >= starts[token]; }
  __device__ void sums(i64 token, REAL* out) const {
    for (int j = 0; j < PACK; ++j) out[j] = bias[j];
    for (int k = 0; k < TAPS; ++k)
      if (counts(token, k))
        for (int j = 0; j < PACK; ++j) out[j] += weight[k][j] * seen[k][j];
  }
};

extern "C" __global__ void penstock_causal_convolution(Rows rows, const ELEMENT* x, const REAL* weight, const REAL* bias, const int* starts, ELEMENT* result) {
  const Part part(rows);
  if (!part.exists) return;
  Window window(rows, part, x, weight, bias, starts);
  for (i64 token = part.begin; token < part.end; ++token) {
    window.move_to(token);
    REAL sum[PACK];
    window.sums(token, sum);
    Pack out;
    for (int j = 0; j < PACK; ++j) put(out.at[j], SILU ? sum[j] / (REAL(1) + growth(-sum[j])) : sum[j]);
    *(Pack*)(result + (part.row * rows.length + token) * rows.channels + part.channel) = out;
  }
}

// partial [tiles, TAPS + 1, channels]: gradients of the weights, then of the bias. The gradient of an input is
// complete TAPS - 1 tokens later, which may be in the next tile: those tokens are computed again.
extern "C" __global__ void penstock_causal_convolution_backward(Rows rows, const ELEMENT* x, const REAL* weight, const REAL* bias, const int* starts, const ELEMENT* gradient, ELEMENT* to_x,
                                                                REAL* partial) {
  const Part part(rows);
  if (!part.exists) return;
  Window window(rows, part, x, weight, bias, starts);
  REAL pending[TAPS][PACK], to_weight[TAPS][PACK], to_bias[PACK];
  for (int j = 0; j < PACK; ++j) {
    to_bias[j] = 0;
    for (int k = 0; k < TAPS; ++k) pending[k][j] = to_weight[k][j] = 0;
  }
  for (i64 token = part.begin; token < part.end + TAPS - 1; ++token) {
    for (int k = 0; k < TAPS; ++k)
      for (int j = 0; j < PACK; ++j) pending[k][j] = k + 1 < TAPS ? pending[k + 1][j] : REAL(0);
    window.move_to(token);
    if (token < rows.length) {
      REAL before[PACK];
      const Pack given = *(const Pack*)(gradient + (part.row * rows.length + token) * rows.channels + part.channel);
      if (SILU) window.sums(token, before);
      for (int j = 0; j < PACK; ++j) {
        REAL local = number(given.at[j]);
        if (SILU) {
          const REAL share = REAL(1) / (REAL(1) + growth(-before[j]));
          local *= share * (REAL(1) + before[j] * (REAL(1) - share));
        }
        before[j] = local;
      }
      for (int k = 0; k < TAPS; ++k)
        if (window.counts(token, k))
          for (int j = 0; j < PACK; ++j) {
            pending[k][j] += window.weight[k][j] * before[j];
            if (token < part.end) to_weight[k][j] += window.seen[k][j] * before[j];
          }
      if (token < part.end)
        for (int j = 0; j < PACK; ++j) to_bias[j] += before[j];
    }
    const i64 complete = token - (TAPS - 1);
    if (complete < part.begin) continue;
    Pack out;
    for (int j = 0; j < PACK; ++j) put(out.at[j], pending[0][j]);
    *(Pack*)(to_x + (part.row * rows.length + complete) * rows.channels + part.channel) = out;
  }
  for (int k = 0; k <= TAPS; ++k)
    for (int j = 0; j < PACK; ++j)
      partial[(part.tile * (TAPS + 1) + k) * rows.channels + part.channel + j] = k < TAPS ? to_weight[k < TAPS ? k : 0][j] : to_bias[j];
}
)";

// As the kernels see it.
struct ConvolutionSizes {
  long long batch, length, channels, batch_stride, token_stride;
};
ConvolutionSizes sizes_of(const at::Tensor& x) {
  return {x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1)};
}

// Channels of a thread: rows of a larger tensor are read in place, so their strides count, too.
std::int64_t channels_of_thread(const at::Tensor& x, std::initializer_list<at::Tensor> others) {
  std::int64_t pack = cuda_pack(x.size(2), kMostChannels, others);
  while (pack > 1 &&
         (x.stride(0) % pack != 0 || x.stride(1) % pack != 0 || cuda_pack(pack, pack, {x}) < pack))
    pack /= 2;
  return pack;
}

CudaKernel& convolution_kernel(const char* name, const ConvolutionTensors& in, std::int64_t pack) {
  return scan_kernel(
      name, {kConvolution}, in.x.scalar_type(),
      {{"PACK", pack}, {"TAPS", in.weight.size(1)}, {"TILE", kTileTokens}, {"SILU", in.silu ? 1 : 0}});
}

std::int64_t tiles_of(const at::Tensor& x) {
  return x.size(0) * ((x.size(1) + kTileTokens - 1) / kTileTokens);
}

}  // namespace

void convolve_on_cuda(const ConvolutionTensors& in, const at::Tensor& result) {
  const std::int64_t pack = channels_of_thread(in.x, {result});
  convolution_kernel("penstock_causal_convolution", in, pack)
      .launch(in.x.get_device(), blocks_of(tiles_of(in.x) * in.x.size(2) / pack, kConvolutionThreads),
              kConvolutionThreads, sizes_of(in.x), device_in(in.x), device_in(in.weight), device_in(in.bias),
              device_in(in.starts), device_out(result));
}

void convolve_backward_on_cuda(const ConvolutionTensors& in, const at::Tensor& gradient,
                               const ConvolutionGradients& out) {
  const std::int64_t pack = channels_of_thread(in.x, {gradient, out.x}), taps = in.weight.size(1);
  const at::Tensor partial = at::empty({tiles_of(in.x), taps + 1, in.x.size(2)}, in.weight.options());
  convolution_kernel("penstock_causal_convolution_backward", in, pack)
      .launch(in.x.get_device(), blocks_of(tiles_of(in.x) * in.x.size(2) / pack, kConvolutionThreads),
              kConvolutionThreads, sizes_of(in.x), device_in(in.x), device_in(in.weight), device_in(in.bias),
              device_in(in.starts), device_in(gradient), device_out(out.x), device_out(partial));
  const at::Tensor sums = partial.sum(0);
  out.weight.copy_(sums.narrow(0, 0, taps).t());
  out.bias.copy_(sums[taps]);
}

}  // namespace penstock::detail
