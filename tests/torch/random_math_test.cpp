// The functions from words to values compared with exact ones. Compiled with -ffp-contract=off.
#include "penstock/torch/random/random_math.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace penstock::random {
namespace random_math_test {

// The exact quantile, from an approximation of it: Newton's method on the distribution function. `tail` is
// the probability below
// -|z|, `centre` is 1/2 - tail; near the centre the latter is the accurate one.
long double exact_size(long double tail, long double centre, long double size) {
  for (int i = 0; i < 3; ++i) {
    const long double density = std::exp(-size * size / 2) * 0.39894228040143267793994605993438187L;
    const long double root_half = 0.70710678118654752440084436210484904L;
    if (centre < 0.3L) {
      size -= (std::erf(size * root_half) / 2 - centre) / density;
    } else {
      size += (std::erfc(size * root_half) / 2 - tail) / density;
    }
  }
  return size;
}

TEST(NormalQuantile, SingleIsWithinItsBound) {
  long double worst = 0;
  const auto check = [&](u32 word) {
    const u32 count = word < 0x80000000u ? word : ~word;
    const long double tail = (count + 0.5L) * 0x1p-32L, centre = ((0x7fffffffu - count) + 0.5L) * 0x1p-32L;
    const float value = normal_quantile(word);
    ASSERT_EQ(value < 0, word < 0x80000000u) << word;
    const long double exact = exact_size(
        tail, centre, static_cast<long double>(normal_quantile((u64{count} << 32) + 0x7fffffffu)) * -1);
    worst = std::max(worst, std::abs((std::abs(value) - exact) / exact));
  };
  for (u64 word = 0; word < 0x100000000ull; word += 65521) check(static_cast<u32>(word));
  for (u32 word = 0; word < 2000; ++word) {
    check(word);                // lower end
    check(~word);               // upper end
    check(0x7fffffffu - word);  // below the median
    check(0x80000000u + word);  // above it
    check(0x13333333u + word);  // where the two quotients meet: 0.075
  }
  EXPECT_LT(worst, 4.4e-7L);
  EXPECT_GT(worst, 1e-8L);  // the limit of float32; a smaller value means that nothing was compared
}

TEST(NormalQuantile, DoubleIsWithinItsBound) {
  std::mt19937_64 generator(1);
  long double worst = 0;
  for (int i = 0; i < 30000; ++i) {
    const u64 count = (generator() >> 1) >> (i % 3 == 0 ? generator() % 63 : 0);
    const long double tail = (count + 0.5L) * 0x1p-64L,
                      centre = ((0x7fffffffffffffffull - count) + 0.5L) * 0x1p-64L;
    const double value = -normal_quantile(count);
    EXPECT_EQ(normal_quantile(~count), value);
    const long double exact = exact_size(tail, centre, value);
    worst = std::max(worst, std::abs((value - exact) / exact));
  }
  EXPECT_LT(worst, 1e-15L);
  EXPECT_GT(worst, 1e-17L);
}

TEST(NormalQuantile, EndsAndSymmetry) {
  EXPECT_FLOAT_EQ(normal_quantile(~0u), 6.337958f);
  EXPECT_NEAR(normal_quantile(~0ull), 9.15529, 1e-5);
  std::mt19937 generator(1);
  for (int i = 0; i < 10000; ++i) {
    const u32 word = generator();
    ASSERT_EQ(normal_quantile(word), -normal_quantile(~word));
  }
}

TEST(NaturalLog, IsAccurate) {
  std::mt19937_64 generator(2);
  for (int i = 0; i < 20000; ++i) {
    const float x = std::bit_cast<float>(
        static_cast<u32>(0x2f000000u + generator() % (0x3f000000u - 0x2f000000u)));  // 2^-33 to 1/2
    EXPECT_NEAR(natural_log(x) / std::log(static_cast<double>(x)), 1, 1.5e-7);
    const double y = std::bit_cast<double>(0x3be0000000000000ull +
                                           generator() % (0x3fe0000000000000ull - 0x3be0000000000000ull));
    EXPECT_NEAR(static_cast<double>(natural_log(y) / std::log(static_cast<long double>(y))), 1, 3e-16);
  }
}

TEST(UnitInterval, IsHalfOpen) {
  EXPECT_EQ(unit_interval(0u), 0.0f);
  EXPECT_EQ(unit_interval(~0u), 1.0f - 0x1p-24f);
  EXPECT_EQ(unit_interval(0x80000000u), 0.5f);
  EXPECT_EQ(unit_interval(0ull), 0.0);
  EXPECT_EQ(unit_interval(~0ull), 1.0 - 0x1p-53);
}

// Compared with LibTorch's own conversions. Its NaNs keep a sign; ours are the plain quiet NaN.
TEST(Rounding, SixteenBitFormats) {
  const auto check = [](u32 bits) {
    const float value = std::bit_cast<float>(bits);
    BFloat16Bits brain{};
    Float16Bits half{};
    store(value, brain);
    store(value, half);
    if (std::isnan(value)) {
      ASSERT_EQ(brain.bits & 0x7fff, 0x7fc0) << bits;
      ASSERT_EQ(half.bits & 0x7fff, 0x7e00) << bits;
    } else {
      ASSERT_EQ(brain.bits, c10::BFloat16(value).x) << bits;
      ASSERT_EQ(half.bits, c10::Half(value).x) << bits;
    }
  };
  for (u64 bits = 0; bits < 0x100000000ull; bits += 4093) check(static_cast<u32>(bits));
  // Around every value that can be represented: exact, and just off the midpoints on both sides.
  for (u32 upper = 0; upper < 0x10000; upper += 7)
    for (const u32 lower :
         {0x0000u, 0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x3001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      check((upper << 16) | lower);
}

TEST(Rounding, EveryHalfIsReadBack) {
  for (u32 bits = 0; bits < 0x10000; ++bits) {
    const auto raw = static_cast<unsigned short>(bits);
    const float half = load(Float16Bits{raw}),
                expected = static_cast<float>(c10::Half(raw, c10::Half::from_bits()));
    const float brain = load(BFloat16Bits{raw}),
                expected_brain = static_cast<float>(c10::BFloat16(raw, c10::BFloat16::from_bits()));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(half));
    } else {
      ASSERT_EQ(std::bit_cast<u32>(half), std::bit_cast<u32>(expected)) << bits;
    }
    ASSERT_EQ(std::bit_cast<u32>(brain), std::bit_cast<u32>(expected_brain)) << bits;
  }
}

}  // namespace random_math_test
}  // namespace penstock::random
