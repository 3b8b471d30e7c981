// The constants of a draw, computed once per call from its arguments, which each function checks. Internal to
// penstock/torch; independent of LibTorch.
#pragma once

#include <variant>

#include "penstock/torch/random/random_math.h"

namespace penstock::random {

// Computed in float32; in float64; in float64, but with the same words as float32 (dropout of float64
// values).
using AnyConstants = std::variant<Constants<float, u32>, Constants<double, u64>, Constants<double, u32>>;

AnyConstants uniform_constants(double low, double high, bool in_double);
AnyConstants normal_constants(double mean, double deviation, bool in_double);
AnyConstants trunc_normal_constants(double mean, double deviation, double low, double high, bool in_double);
AnyConstants bernoulli_constants(double p);
AnyConstants dropout_constants(double p, bool in_double);

}  // namespace penstock::random
