// The loops of the convolution on the CPU. Channels are adjacent, so that every inner loop runs over channels
// and is vectorized; taps and tokens are outside of it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "penstock/torch/scan/causal_convolution_kernels.h"
#include "penstock/torch/scan/vector_exp.h"

namespace penstock::detail {
namespace {

constexpr std::int64_t kBlockChannels = 256;  // of one pass of backward: its sums stay in the L1 cache

// Raw pointers of a convolution.
template <class Real>
struct ConvolutionRows {
  std::int64_t batch, length, channels, taps;
  const Real* x;
  std::int64_t batch_stride, token_stride;
  std::vector<Real> weight;  // [taps, channels]
  const Real* bias;          // or null
  const std::int32_t* starts;
  bool silu;

  explicit ConvolutionRows(const ConvolutionTensors& in)
      : batch(in.x.size(0)),
        length(in.x.size(1)),
        channels(in.x.size(2)),
        taps(in.weight.size(1)),
        x(in.x.data_ptr<Real>()),
        batch_stride(in.x.stride(0)),
        token_stride(in.x.stride(1)),
        weight(static_cast<std::size_t>(taps * channels)),
        bias(in.bias.defined() ? in.bias.data_ptr<Real>() : nullptr),
        starts(in.starts.defined() ? in.starts.data_ptr<std::int32_t>() : nullptr),
        silu(in.silu) {
    const Real* const from = in.weight.data_ptr<Real>();
    for (std::int64_t channel = 0; channel < channels; ++channel)
      for (std::int64_t tap = 0; tap < taps; ++tap)
        weight[static_cast<std::size_t>(tap * channels + channel)] = from[channel * taps + tap];
  }

  const Real* input(std::int64_t row, std::int64_t token) const {
    return x + row * batch_stride + token * token_stride;
  }
  // The first tap of a token that is within its row and document.
  std::int64_t first_tap(std::int64_t row, std::int64_t token) const {
    const std::int64_t begin = starts != nullptr ? std::max(starts[row * length + token], 0) : 0;
    return std::max<std::int64_t>(0, begin - (token - (taps - 1)));
  }

  // Sums of the channels [from, from + count) of one token, before the activation.
  void sums(std::int64_t row, std::int64_t token, std::int64_t from, std::int64_t count,
            Real* __restrict out) const {
    if (bias != nullptr)
      std::copy_n(bias + from, count, out);
    else
      std::fill_n(out, count, Real(0));
    for (std::int64_t tap = first_tap(row, token); tap < taps; ++tap) {
      const Real* __restrict const in = input(row, token - (taps - 1) + tap) + from;
      const Real* __restrict const w = weight.data() + tap * channels + from;
      for (std::int64_t i = 0; i < count; ++i) out[i] += w[i] * in[i];
    }
  }
};

template <class Real>
void convolve(const ConvolutionRows<Real>& rows, Real* result) {
  const std::int64_t grain = std::max<std::int64_t>(1, 16384 / rows.channels);
  at::parallel_for(0, rows.batch * rows.length, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Real* __restrict const out = result + i * rows.channels;
      rows.sums(i / rows.length, i % rows.length, 0, rows.channels, out);
      if (rows.silu)
        for (std::int64_t c = 0; c < rows.channels; ++c) out[c] *= vector_sigmoid(out[c]);
    }
  });
}

// Gradients of the channels [from, from + count): of all tokens, so that threads share no sum.
template <class Real>
void convolve_backward_block(const ConvolutionRows<Real>& rows, const Real* gradient, std::int64_t from,
                             std::int64_t count, Real* to_x, Real* to_weight, Real* to_bias) {
  const std::int64_t channels = rows.channels, taps = rows.taps;
  std::vector<Real> weight_sums(static_cast<std::size_t>(taps * count)),
      bias_sums(static_cast<std::size_t>(count)), local(static_cast<std::size_t>(count));
  for (std::int64_t row = 0; row < rows.batch; ++row)
    for (std::int64_t token = 0; token < rows.length; ++token) {
      const std::int64_t at = (row * rows.length + token) * channels + from;
      Real* __restrict const pre = local.data();
      const Real* __restrict const given = gradient + at;
      if (rows.silu) {
        rows.sums(row, token, from, count, pre);
        for (std::int64_t i = 0; i < count; ++i) {
          const Real share = vector_sigmoid(pre[i]);
          pre[i] = given[i] * (share * (Real(1) + pre[i] * (Real(1) - share)));
        }
      } else {
        std::copy_n(given, count, pre);
      }
      Real* __restrict const bias_sum = bias_sums.data();
      for (std::int64_t i = 0; i < count; ++i) bias_sum[i] += pre[i];
      std::fill_n(to_x + at, count, Real(0));
      for (std::int64_t tap = rows.first_tap(row, token); tap < taps; ++tap) {
        const std::int64_t other = token - (taps - 1) + tap;
        const Real* __restrict const in = rows.input(row, other) + from;
        const Real* __restrict const w = rows.weight.data() + tap * channels + from;
        Real* __restrict const out = to_x + (row * rows.length + other) * channels + from;
        Real* __restrict const sum = weight_sums.data() + tap * count;
        for (std::int64_t i = 0; i < count; ++i) {
          out[i] += w[i] * pre[i];
          sum[i] += in[i] * pre[i];
        }
      }
    }
  for (std::int64_t i = 0; i < count; ++i) {
    to_bias[from + i] = bias_sums[static_cast<std::size_t>(i)];
    for (std::int64_t tap = 0; tap < taps; ++tap)
      to_weight[(from + i) * taps + tap] = weight_sums[static_cast<std::size_t>(tap * count + i)];
  }
}

template <class Real>
void convolve_backward(const ConvolutionRows<Real>& rows, const at::Tensor& gradient,
                       const ConvolutionGradients& out) {
  const std::int64_t blocks = (rows.channels + kBlockChannels - 1) / kBlockChannels;
  at::parallel_for(0, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t from = block * kBlockChannels;
      convolve_backward_block(rows, gradient.data_ptr<Real>(), from,
                              std::min(kBlockChannels, rows.channels - from), out.x.data_ptr<Real>(),
                              out.weight.data_ptr<Real>(), out.bias.data_ptr<Real>());
    }
  });
}

}  // namespace

void convolve_on_cpu(const ConvolutionTensors& in, const at::Tensor& result) {
  if (in.x.scalar_type() == at::kDouble)
    convolve(ConvolutionRows<double>(in), result.data_ptr<double>());
  else
    convolve(ConvolutionRows<float>(in), result.data_ptr<float>());
}

void convolve_backward_on_cpu(const ConvolutionTensors& in, const at::Tensor& gradient,
                              const ConvolutionGradients& out) {
  if (in.x.scalar_type() == at::kDouble)
    convolve_backward(ConvolutionRows<double>(in), gradient, out);
  else
    convolve_backward(ConvolutionRows<float>(in), gradient, out);
}

}  // namespace penstock::detail
