// The loops of fused_steps.cpp over contiguous float32 values. Private to this folder.
#pragma once

#include <cstdint>

namespace penstock::detail {

struct AdamWFactors {
  float keep;  // 1 - lr * weight_decay
  float beta1, rest1, beta2, rest2;
  float root;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float size;  // lr / (1 - beta1^step)
};

void adamw_loop(float* parameter, const float* gradient, float* exp_avg, float* exp_avg_sq,
                std::int64_t count, const AdamWFactors& factors);

struct SgdFactors {
  float lr, momentum, weight_decay;
  bool nesterov;
};

// `momentum` is null if there is none.
void sgd_loop(float* parameter, const float* gradient, float* momentum, std::int64_t count,
              const SgdFactors& factors);

double square_sum_loop(const float* values, std::int64_t count);

}  // namespace penstock::detail
