#include "penstock/torch/fused_steps_cpu.h"

#include <cmath>

namespace penstock::detail {

void adamw_loop(float* __restrict parameter, const float* __restrict gradient, float* __restrict exp_avg, float* __restrict exp_avg_sq, std::int64_t count, const AdamWFactors& factors) {
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

namespace {

template <bool nesterov>
void momentum_loop(float* __restrict parameter, const float* __restrict gradient, float* __restrict momentum, std::int64_t count, const SgdFactors f) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] + f.weight_decay * parameter[i];
    const float m = momentum[i] * f.momentum + g;
    momentum[i] = m;
    parameter[i] -= f.lr * (nesterov ? g + f.momentum * m : m);
  }
}

}  // namespace

void sgd_loop(float* __restrict parameter, const float* __restrict gradient, float* __restrict momentum, std::int64_t count, const SgdFactors& factors) {
  const SgdFactors f = factors;
  if (momentum) return f.nesterov ? momentum_loop<true>(parameter, gradient, momentum, count, f) : momentum_loop<false>(parameter, gradient, momentum, count, f);
  for (std::int64_t i = 0; i < count; ++i) parameter[i] -= f.lr * (gradient[i] + f.weight_decay * parameter[i]);
}

double square_sum_loop(const float* values, std::int64_t count) {
  // Eight sums side by side: the vectorizer may not reorder one.
  constexpr int kLanes = 8;
  double sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += static_cast<double>(values[i + lane]) * static_cast<double>(values[i + lane]);
  double total = 0;
  for (; i < count; ++i) total += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace penstock::detail
