// Maps random words to values: uniform, normal, truncated normal, Bernoulli; and rounds to 16-bit formats.
//
// Uses only integer operations and +, -, *, / and sqrt, which IEEE 754 defines to the last bit. So the host
// and the device, vector and scalar code produce the same bits, provided that no multiplication is fused with
// an addition: every file that includes this one is compiled with -ffp-contract=off (device: --fmad=false).
// No intermediate value of a draw is subnormal, so flushing subnormals to zero changes nothing.
//
// This file is also the source text of the CUDA kernels: no includes other than philox.h.
//
// Accuracy: a standard normal number is within 4.4e-7 of the exact quantile in float32 (measured over all
// words) and within 1e-15 in float64 (over three million), relative.
#pragma once

#include "penstock/base/philox.h"

namespace penstock::random {

using philox::u32;
using philox::u64;

// -------------------------------------------------------------------------------------------------------------
// bits

#ifdef __CUDACC__
PENSTOCK_HOST_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
PENSTOCK_HOST_DEVICE u64 bits_of(double value) { return static_cast<u64>(__double_as_longlong(value)); }
PENSTOCK_HOST_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
PENSTOCK_HOST_DEVICE double double_of(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }
PENSTOCK_HOST_DEVICE float square_root(float value) { return __fsqrt_rn(value); }
PENSTOCK_HOST_DEVICE double square_root(double value) { return __dsqrt_rn(value); }
PENSTOCK_HOST_DEVICE u64 upper_product(u64 a, u64 b) { return __umul64hi(a, b); }
#else
PENSTOCK_HOST_DEVICE u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
PENSTOCK_HOST_DEVICE u64 bits_of(double value) { return __builtin_bit_cast(u64, value); }
PENSTOCK_HOST_DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
PENSTOCK_HOST_DEVICE double double_of(u64 bits) { return __builtin_bit_cast(double, bits); }
PENSTOCK_HOST_DEVICE float square_root(float value) { return __builtin_sqrtf(value); }
PENSTOCK_HOST_DEVICE double square_root(double value) { return __builtin_sqrt(value); }
PENSTOCK_HOST_DEVICE u64 upper_product(u64 a, u64 b) {
  __extension__ using u128 = unsigned __int128;
  return static_cast<u64>((static_cast<u128>(a) * b) >> 64);
}
#endif
PENSTOCK_HOST_DEVICE u32 upper_product(u32 a, u32 b) { return philox::high(u64{a} * b); }

// ---------------------------------------------------------------------------------------------------------
// logarithm

// Natural logarithm of a positive normal number, to about one unit in the last place: the number is split
// into 2^k * m with m in [sqrt(1/2), sqrt(2)); log m is a polynomial of Cephes (float) or fdlibm (double).
PENSTOCK_HOST_DEVICE float natural_log(float x) {
  const u32 bits = bits_of(x);
  const int k = static_cast<int>(bits - 0x3f3504f3u) >> 23;
  const float f = float_of(bits - (static_cast<u32>(k) << 23)) - 1.0f;
  const float power = static_cast<float>(k);
  const float f2 = f * f;
  const float f4 = f2 * f2;
  // Degree 8, evaluated in the order that exposes the most instruction-level parallelism.
  const float p01 = 3.3333331174e-1f - 2.4999993993e-1f * f;
  const float p23 = 2.0000714765e-1f - 1.6668057665e-1f * f;
  const float p45 = 1.4249322787e-1f - 1.2420140846e-1f * f;
  const float p67 = 1.1676998740e-1f - 1.1514610310e-1f * f;
  const float p = (p01 + p23 * f2) + ((p45 + p67 * f2) + 7.0376836292e-2f * f4) * f4;
  float y = p * (f * f2);
  y = y - 2.12194440e-4f * power;  // log 2 in two parts: 0.693359375 - 2.1219444e-4
  y = y - 0.5f * f2;
  return (f + y) + 0.693359375f * power;
}

PENSTOCK_HOST_DEVICE double natural_log(double x) {
  const u64 bits = bits_of(x);
  const long long k = static_cast<long long>(bits - 0x3fe6a09e667f3bcdull) >> 52;
  const double f = double_of(bits - (static_cast<u64>(k) << 52)) - 1.0;
  const double power = static_cast<double>(k);
  const double s = f / (2.0 + f);
  const double z = s * s;
  const double w = z * z;
  const double even =
      w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double odd =
      z * (6.666666666666735130e-01 +
           w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const double half_square = 0.5 * f * f;
  return power * 6.93147180369123816490e-01 -
         ((half_square - (s * (half_square + (even + odd)) + power * 1.90821492927058770002e-10)) - f);
}

// ------------------------------------------------------------------------------------------------------------
// normal

// The quantile of the standard normal distribution at probability (word + 1/2) / 2^32: increasing in the
// word, up to rounding errors. The word is split into a sign and a number below 2^31, from which the
// distances to the tail and to the centre are both computed without cancellation, so that both ends keep
// their relative accuracy. Quotients of polynomials: PPND7 of Wichura, algorithm AS 241, Applied Statistics
// 37 (1988). The largest value is 6.34.
PENSTOCK_HOST_DEVICE float normal_quantile(u32 word) {
  const u32 upper = static_cast<u32>(static_cast<int>(word) >> 31);  // all ones in the upper half
  const u32 count = word ^ upper;
  const float tail = (static_cast<float>(static_cast<int>(count)) + 0.5f) * 0x1p-32f;
  const float centre = (static_cast<float>(static_cast<int>(0x7fffffffu - count)) + 0.5f) * 0x1p-32f;

  const float r = 0.180625f - centre * centre;
  const float inner_top =
      centre * (((5.9109374720e+1f * r + 1.5929113202e+2f) * r + 5.0434271938e+1f) * r + 3.3871327179e+0f);
  const float inner_bottom = ((6.7187563600e+1f * r + 7.8757757664e+1f) * r + 1.7895169469e+1f) * r + 1.0f;

  const float t = square_root(-natural_log(tail)) - 1.6f;
  const float outer_top =
      ((1.7023821103e-1f * t + 1.3067284816e+0f) * t + 2.7568153900e+0f) * t + 1.4234372777e+0f;
  const float outer_bottom = (1.2021132975e-1f * t + 7.3700164250e-1f) * t + 1.0f;

  const bool inner = centre <= 0.425f;
  const float size = (inner ? inner_top : outer_top) / (inner ? inner_bottom : outer_bottom);
  return float_of(bits_of(size) | (~upper & 0x80000000u));
}

// The same at (word + 1/2) / 2^64, by PPND16 of the same paper. The largest value is 9.16.
PENSTOCK_HOST_DEVICE double normal_quantile(u64 word) {
  const u64 upper = static_cast<u64>(static_cast<long long>(word) >> 63);
  const u64 count = word ^ upper;
  const double tail = (static_cast<double>(static_cast<long long>(count)) + 0.5) * 0x1p-64;
  const double centre =
      (static_cast<double>(static_cast<long long>(0x7fffffffffffffffull - count)) + 0.5) * 0x1p-64;
  double top, bottom;
  if (centre <= 0.425) {
    const double r = 0.180625 - centre * centre;
    top =
        centre *
        (((((((2.5090809287301226727e+3 * r + 3.3430575583588128105e+4) * r + 6.7265770927008700853e+4) * r +
             4.5921953931549871457e+4) *
                r +
            1.3731693765509461125e+4) *
               r +
           1.9715909503065514427e+3) *
              r +
          1.3314166789178437745e+2) *
             r +
         3.3871328727963666080e+0);
    bottom =
        ((((((5.2264952788528545610e+3 * r + 2.8729085735721942674e+4) * r + 3.9307895800092710610e+4) * r +
            2.1213794301586595867e+4) *
               r +
           5.3941960214247511077e+3) *
              r +
          6.8718700749205790830e+2) *
             r +
         4.2313330701600911252e+1) *
            r +
        1.0;
  } else {
    const double root = square_root(-natural_log(tail));
    if (root <= 5.0) {
      const double t = root - 1.6;
      top =
          ((((((7.74545014278341407640e-4 * t + 2.27238449892691845833e-2) * t + 2.41780725177450611770e-1) *
                  t +
              1.27045825245236838258e+0) *
                 t +
             3.64784832476320460504e+0) *
                t +
            5.76949722146069140550e+0) *
               t +
           4.63033784615654529590e+0) *
              t +
          1.42343711074968357734e+0;
      bottom =
          ((((((1.05075007164441684324e-9 * t + 5.47593808499534494600e-4) * t + 1.51986665636164571966e-2) *
                  t +
              1.48103976427480074590e-1) *
                 t +
             6.89767334985100004550e-1) *
                t +
            1.67638483018380384940e+0) *
               t +
           2.05319162663775882187e+0) *
              t +
          1.0;
    } else {
      const double t = root - 5.0;
      top =
          ((((((2.01033439929228813265e-7 * t + 2.71155556874348757815e-5) * t + 1.24266094738807843860e-3) *
                  t +
              2.65321895265761230930e-2) *
                 t +
             2.96560571828504891230e-1) *
                t +
            1.78482653991729133580e+0) *
               t +
           5.46378491116411436990e+0) *
              t +
          6.65790464350110377720e+0;
      bottom =
          ((((((2.04426310338993978564e-15 * t + 1.42151175831644588870e-7) * t + 1.84631831751005468180e-5) *
                  t +
              7.86869131145613259100e-4) *
                 t +
             1.48753612908506148525e-2) *
                t +
            1.36929880922735805310e-1) *
               t +
           5.99832206555887937690e-1) *
              t +
          1.0;
    }
  }
  const double size = top / bottom;
  return double_of(bits_of(size) | (~upper & 0x8000000000000000ull));
}

// [0, 1) in steps of 2^-24 or 2^-53.
PENSTOCK_HOST_DEVICE float unit_interval(u32 word) {
  return static_cast<float>(static_cast<int>(word >> 8)) * 0x1p-24f;
}
PENSTOCK_HOST_DEVICE double unit_interval(u64 word) {
  return static_cast<double>(static_cast<long long>(word >> 11)) * 0x1p-53;
}

// -------------------------------------------------------------------------------------------------------------
// draws

enum class Kind : int { Uniform, Normal, TruncNormal, Bernoulli, Dropout };

// The constants of a draw. Real is the type it is computed in, Word the type of the random word that one
// element takes.
template <class Real, class Word>
struct Constants {
  Real a = 0, b = 0, c = 0, d = 0;
  Word first = 0;  // first of the words that a truncated draw is mapped to
  Word last = 0;   // last of those words, or the last word that means 1
  Word any = 0;    // all ones if some word means 1
};

template <Kind kind, class Real, class Word>
PENSTOCK_HOST_DEVICE Real draw(Word word, const Constants<Real, Word>& k) {
  if constexpr (kind == Kind::Uniform) {  // a: low, b: width, c: the largest value
    const Real value = k.a + unit_interval(word) * k.b;
    return value < k.c ? value : k.c;
  } else if constexpr (kind == Kind::Normal) {  // a: mean, b: standard deviation
    return k.a + k.b * normal_quantile(word);
  } else if constexpr (kind == Kind::TruncNormal) {  // a: mean, b: standard deviation, c: low, d: high
    const Word words = k.last - k.first + 1;         // 0: all of them
    const Word within = words == 0 ? word : k.first + upper_product(word, words);
    const Real value = k.a + k.b * normal_quantile(within);
    const Real above = value < k.c ? k.c : value;
    return above > k.d ? k.d : above;
  } else {  // Bernoulli: 1 or 0
    static_assert(kind == Kind::Bernoulli);
    return (word <= k.last ? k.any : Word{0}) != 0 ? Real{1} : Real{0};
  }
}

// a: the scale factor of kept elements. Drops the elements for which the same Bernoulli draw is 1.
template <class Real>
PENSTOCK_HOST_DEVICE Real dropout(u32 word, Real value, const Constants<Real, u32>& k) {
  return (word <= k.last ? k.any : 0u) != 0 ? Real{0} : value * k.a;
}

// ----------------------------------------------------------------------------------------------------------
// elements

// Storage of the 16-bit formats. Each rounds once, to nearest even; NaN becomes the quiet NaN.
struct BFloat16Bits {
  unsigned short bits;
};
struct Float16Bits {
  unsigned short bits;
};

PENSTOCK_HOST_DEVICE void store(float value, float& out) { out = value; }
PENSTOCK_HOST_DEVICE void store(float value, double& out) { out = static_cast<double>(value); }
PENSTOCK_HOST_DEVICE void store(double value, double& out) { out = value; }
PENSTOCK_HOST_DEVICE void store(float value, bool& out) { out = value != 0; }
PENSTOCK_HOST_DEVICE void store(float value, BFloat16Bits& out) {
  const u32 bits = bits_of(value);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
PENSTOCK_HOST_DEVICE void store(float value, Float16Bits& out) {
  const u32 sign = bits_of(value) & 0x80000000u;
  const u32 bits = bits_of(value) ^ sign;
  // Below 2^-14 the format is fixed point: adding 1/2 moves the bits into position and rounds them.
  const u32 fixed = bits_of(float_of(bits < 0x38800000u ? bits : 0u) + 0.5f) - 0x3f000000u;
  const u32 floating = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const u32 special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const u32 finite = bits < 0x38800000u ? fixed : floating;
  out.bits = static_cast<unsigned short>((bits >= 0x47800000u ? special : finite) | (sign >> 16));
}

PENSTOCK_HOST_DEVICE float load(const float& in) { return in; }
PENSTOCK_HOST_DEVICE double load(const double& in) { return in; }
PENSTOCK_HOST_DEVICE float load(const BFloat16Bits& in) { return float_of(static_cast<u32>(in.bits) << 16); }
PENSTOCK_HOST_DEVICE float load(const Float16Bits& in) {
  const u32 moved = (static_cast<u32>(in.bits) & 0x7fffu) << 13;
  const u32 exponent = moved & 0x0f800000u;
  const u32 special = exponent == 0x0f800000u ? 0x38000000u : 0u;  // infinity and NaN
  const u32 normal = moved + 0x38000000u + special;
  const u32 subnormal = bits_of(float_of(moved + 0x38800000u) - 0x1p-14f);
  const u32 size = exponent == 0 ? subnormal : normal;
  return float_of(size | ((static_cast<u32>(in.bits) & 0x8000u) << 16));
}

}  // namespace penstock::random
