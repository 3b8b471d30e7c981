// 8-bit numbers: every value becomes the nearest number of the format, scaled by block.
#include "penstock/torch/compat/float8.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <vector>

namespace penstock {
namespace float8_test {

// All finite numbers of the format that are not negative, from its definition.
std::vector<double> numbers() {
  std::vector<double> all;
  for (int exponent = 0; exponent < 16; ++exponent)
    for (int fraction = 0; fraction < 8; ++fraction)
      if (exponent < 15 || fraction < 7)
        all.push_back(exponent == 0 ? fraction * std::pow(2.0, -9)
                                    : (1 + fraction / 8.0) * std::pow(2.0, exponent - 7));
  return all;
}

double distance_to_nearest(double value) {
  double nearest = std::numeric_limits<double>::infinity();
  for (const double each : numbers()) nearest = std::min(nearest, std::fabs(std::fabs(value) - each));
  return nearest;
}

TEST(Float8, TheNumbersOfTheFormatAreExact) {
  std::vector<float> values;
  for (const double each : numbers()) values.push_back(static_cast<float>(each));
  ASSERT_EQ(values.size(), 127u);
  values.push_back(-448);  // the block has a scale of 1
  const at::Tensor all = at::tensor(values);
  EXPECT_TRUE(at::equal(from_float8(to_float8(all), all.numel()), all));
  EXPECT_TRUE(at::equal(from_float8(to_float8(all.neg()), all.numel()), all.neg()));
}

TEST(Float8, ValuesBecomeTheNearestNumber) {
  at::manual_seed(3);
  for (int round = 0; round < 20; ++round) {
    at::Tensor values = at::randn({128}) * std::pow(4.0, -(round % 8)) * 300;
    values = values.clamp(-448, 448);
    values[0] = 448;
    const at::Tensor back = from_float8(to_float8(values), 128);
    for (std::int64_t i = 0; i < 128; ++i) {
      const double value = values[i].item<double>(), read = back[i].item<double>();
      ASSERT_NEAR(std::fabs(read - value), distance_to_nearest(value), 1e-6 * std::fabs(value)) << value;
      ASSERT_EQ(distance_to_nearest(read), 0) << read;
    }
  }
}

TEST(Float8, TiesGoToTheEvenNumber) {
  // Between 16 (fraction 0) and 18 (fraction 1), between 18 and 20, and halfway between multiples of 2^-9.
  at::Tensor values = at::zeros({128});
  values[0] = 448;
  values[1] = 17;
  values[2] = 19;
  values[3] = std::ldexp(1.5F, -9);
  values[4] = std::ldexp(0.5F, -9);
  const at::Tensor back = from_float8(to_float8(values), 128);
  EXPECT_EQ(back[1].item<float>(), 16);
  EXPECT_EQ(back[2].item<float>(), 20);
  EXPECT_EQ(back[3].item<float>(), std::ldexp(2.0F, -9));
  EXPECT_EQ(back[4].item<float>(), 0);
}

TEST(Float8, EveryBlockHasItsOwnScale) {
  at::manual_seed(5);
  for (const std::int64_t count : {0, 1, 127, 128, 129, 1000}) {
    at::Tensor values = at::randn({count}, at::kDouble);
    for (std::int64_t i = 0; i < count; ++i)
      values[i] *= std::pow(10.0, static_cast<double>(i / 128 * 6 - 18));
    const at::Tensor bytes = to_float8(values);
    ASSERT_EQ(bytes.numel(), float8_bytes(count));
    const at::Tensor back = from_float8(bytes, count).to(at::kDouble);
    for (std::int64_t first = 0; first < count; first += 128) {
      const std::int64_t size = std::min<std::int64_t>(128, count - first);
      const at::Tensor block = values.narrow(0, first, size), read = back.narrow(0, first, size);
      // Half a step of normal numbers, and of those near 0.
      const at::Tensor allowed = block.abs() / 16 * (1 + 1e-6) + block.abs().max() / 448 * std::pow(2.0, -10);
      EXPECT_TRUE((read - block).abs().le(allowed).all().item<bool>()) << count << " at " << first;
    }
  }
}

TEST(Float8, WhatIsNotFiniteStaysVisible) {
  at::Tensor values = at::ones({256});
  values[3] = std::numeric_limits<float>::quiet_NaN();
  values[130] = std::numeric_limits<float>::infinity();
  const at::Tensor back = from_float8(to_float8(values), 256);
  EXPECT_TRUE(std::isnan(back[3].item<float>()));
  EXPECT_TRUE(std::isnan(back[130].item<float>()));
  EXPECT_EQ(back[4].item<float>(), 1);
  EXPECT_EQ(back[131].item<float>(), 1);
}

TEST(Float8, TinyBlocksBecomeZero) {
  const at::Tensor tiny = at::full({128}, 1e-42F);
  EXPECT_TRUE(at::equal(from_float8(to_float8(tiny), 128), at::zeros({128})));
}

TEST(Float8, OnCudaTheSameBytes) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(9);
  at::Tensor values = at::randn({10000}) * at::randn({10000}).exp();
  values[77] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor here = to_float8(values), there = to_float8(values.cuda());
  // The sign of NaN is not defined.
  const at::Tensor read = from_float8(here, 10000), other = from_float8(there, 10000).cpu();
  EXPECT_TRUE(at::equal(at::nan_to_num(read), at::nan_to_num(other)));
}

}  // namespace float8_test
}  // namespace penstock
