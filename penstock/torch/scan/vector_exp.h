// Exponentials for loops that the compiler vectorizes: no branch, no call. Private to this folder.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace penstock::detail {

// Within 2 units in the last place. Results below the smallest normal number and above the largest one are
// clamped to about those; NaN stays NaN.
inline float vector_exp(float x) {
  constexpr float kLog2E = 1.44269504F, kLn2High = 0.693359375F, kLn2Low = -2.12194440e-4F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const float in = std::min(std::max(x, -87.0F), 88.0F);
  const float shifted = in * kLog2E + kRound;
  const float whole = shifted - kRound;
  const float rest = (in - whole * kLn2High) - whole * kLn2Low;
  float series = 1.9875691500e-4F;
  series = series * rest + 1.3981999507e-3F;
  series = series * rest + 8.3334519073e-3F;
  series = series * rest + 4.1665795894e-2F;
  series = series * rest + 1.6666665459e-1F;
  series = series * rest + 5.0000001201e-1F;
  const float mantissa = series * rest * rest + rest + 1.0F;
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kRound);
  return mantissa * std::bit_cast<float>((exponent + 127U) << 23);
}
inline double vector_exp(double x) { return std::exp(x); }

template <class Real>
inline Real vector_sigmoid(Real x) {
  return Real(1) / (Real(1) + vector_exp(-x));
}

}  // namespace penstock::detail
