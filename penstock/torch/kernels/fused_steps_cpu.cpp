#include "penstock/torch/kernels/fused_steps_cpu.h"

#include <cmath>

// Each loop is compiled twice, the second time for eight-float registers, which is used if the processor
// supports it. No flag here allows fusing a multiplication with an addition, so both produce the same bits.
#if defined(__x86_64__) && defined(__GNUC__)
#define PENSTOCK_WIDE __attribute__((target("avx2")))
#else
#define PENSTOCK_WIDE
#endif
#define PENSTOCK_INLINE inline __attribute__((always_inline))

namespace penstock::detail {
namespace {

bool is_wide() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool result = __builtin_cpu_supports("avx2");
  return result;
#else
  return false;
#endif
}

PENSTOCK_INLINE void adamw(float* __restrict parameter, const float* __restrict gradient,
                           float* __restrict exp_avg, float* __restrict exp_avg_sq, std::int64_t count,
                           const AdamWFactors& factors) {
  const AdamWFactors f = factors;
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i];
    const float m = exp_avg[i] * f.beta1 + g * f.rest1;
    const float v = exp_avg_sq[i] * f.beta2 + g * g * f.rest2;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    parameter[i] = parameter[i] * f.keep - f.size * m / (std::sqrt(v) * f.root + f.eps);
  }
}

template <bool nesterov>
PENSTOCK_INLINE void momentum_sgd(float* __restrict parameter, const float* __restrict gradient,
                                  float* __restrict momentum, std::int64_t count, const SgdFactors f) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] + f.weight_decay * parameter[i];
    const float m = momentum[i] * f.momentum + g;
    momentum[i] = m;
    parameter[i] -= f.lr * (nesterov ? g + f.momentum * m : m);
  }
}

PENSTOCK_INLINE void sgd(float* __restrict parameter, const float* __restrict gradient,
                         float* __restrict momentum, std::int64_t count, const SgdFactors& factors) {
  const SgdFactors f = factors;
  if (!momentum)
    for (std::int64_t i = 0; i < count; ++i)
      parameter[i] -= f.lr * (gradient[i] + f.weight_decay * parameter[i]);
  else if (f.nesterov)
    momentum_sgd<true>(parameter, gradient, momentum, count, f);
  else
    momentum_sgd<false>(parameter, gradient, momentum, count, f);
}

PENSTOCK_INLINE double square_sum(const float* values, std::int64_t count) {
  // Eight independent sums, because the vectorizer may not reorder a single one.
  constexpr int kLanes = 8;
  double sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane)
      sums[lane] += static_cast<double>(values[i + lane]) * static_cast<double>(values[i + lane]);
  double total = 0;
  for (; i < count; ++i) total += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  for (const double sum : sums) total += sum;
  return total;
}

PENSTOCK_WIDE void wide_adamw(float* parameter, const float* gradient, float* exp_avg, float* exp_avg_sq,
                              std::int64_t count, const AdamWFactors& factors) {
  adamw(parameter, gradient, exp_avg, exp_avg_sq, count, factors);
}
PENSTOCK_WIDE void wide_sgd(float* parameter, const float* gradient, float* momentum, std::int64_t count,
                            const SgdFactors& factors) {
  sgd(parameter, gradient, momentum, count, factors);
}
PENSTOCK_WIDE double wide_square_sum(const float* values, std::int64_t count) {
  return square_sum(values, count);
}

}  // namespace

void adamw_loop(float* parameter, const float* gradient, float* exp_avg, float* exp_avg_sq,
                std::int64_t count, const AdamWFactors& factors) {
  if (is_wide()) return wide_adamw(parameter, gradient, exp_avg, exp_avg_sq, count, factors);
  adamw(parameter, gradient, exp_avg, exp_avg_sq, count, factors);
}

void sgd_loop(float* parameter, const float* gradient, float* momentum, std::int64_t count,
              const SgdFactors& factors) {
  if (is_wide()) return wide_sgd(parameter, gradient, momentum, count, factors);
  sgd(parameter, gradient, momentum, count, factors);
}

double square_sum_loop(const float* values, std::int64_t count) {
  return is_wide() ? wide_square_sum(values, count) : square_sum(values, count);
}

}  // namespace penstock::detail
