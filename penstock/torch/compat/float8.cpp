#include "penstock/torch/compat/float8.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"

namespace penstock {
namespace {

constexpr std::int64_t kFloat8Block = 128;
constexpr float kFloat8Largest = 448;
constexpr std::int64_t kFloat8Grain = 1 << 15;  // values of a thread at a time

std::int64_t float8_blocks(std::int64_t values) { return (values + kFloat8Block - 1) / kFloat8Block; }

// Rounds to nearest, ties to even.
std::uint8_t float8_code(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80);
  std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x43e80000) return sign | 0x7f;  // above 464: nearer to 480 than to 448, or not a number
  if (magnitude < 0x3c800000)                      // below 2^-6: steps of 2^-9
    return sign | static_cast<std::uint8_t>(std::nearbyint(std::fabs(value) * 512.0F));
  magnitude += 0x7ffff + (magnitude >> 20 & 1);
  return sign | static_cast<std::uint8_t>((magnitude >> 20) - (120 << 3));
}

std::array<float, 256> float8_values() {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    if ((code & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
    values[static_cast<std::size_t>(code)] = code < 128 ? value : -value;
  }
  return values;
}

#if PENSTOCK_TORCH_AT_LEAST(2, 1)
at::Tensor codes_on_device(const at::Tensor& scaled) { return scaled.to(at::kFloat8_e4m3fn).view(at::kByte); }
at::Tensor values_on_device(const at::Tensor& codes) { return codes.view(at::kFloat8_e4m3fn).to(at::kFloat); }
#else
at::Tensor codes_on_device(const at::Tensor&) {
  throw NotImplemented("8-bit numbers on this device: this LibTorch has none; LibTorch 2.1 and later have");
}
at::Tensor values_on_device(const at::Tensor& codes) { return codes_on_device(codes); }
#endif

at::Tensor codes_of(const at::Tensor& scaled) {
  if (!scaled.is_cpu()) return codes_on_device(scaled);
  at::Tensor codes = at::empty(scaled.sizes(), scaled.options().dtype(at::kByte));
  const float* from = scaled.data_ptr<float>();
  std::uint8_t* to = codes.data_ptr<std::uint8_t>();
  at::parallel_for(0, scaled.numel(), kFloat8Grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] = float8_code(from[i]);
  });
  return codes;
}

at::Tensor values_of(const at::Tensor& codes) {
  if (!codes.is_cpu()) return values_on_device(codes);
  static const std::array<float, 256> table = float8_values();
  at::Tensor values = at::empty(codes.sizes(), codes.options().dtype(at::kFloat));
  const std::uint8_t* from = codes.data_ptr<std::uint8_t>();
  float* to = values.data_ptr<float>();
  at::parallel_for(0, codes.numel(), kFloat8Grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] = table[from[i]];
  });
  return values;
}

}  // namespace

std::int64_t float8_bytes(std::int64_t values) {
  return float8_blocks(values) * (kFloat8Block + static_cast<std::int64_t>(sizeof(float)));
}

at::Tensor to_float8(const at::Tensor& values) {
  const std::int64_t count = values.numel(), blocks = float8_blocks(count);
  at::Tensor rows = at::zeros({blocks * kFloat8Block}, values.options().dtype(at::kFloat));
  rows.narrow(0, 0, count).copy_(values);
  rows = rows.view({blocks, kFloat8Block});
  at::Tensor scales = rows.abs().amax({1}, /*keepdim=*/true).mul_(1 / kFloat8Largest);
  // Also where a tiny maximum has a scale that is not a normal number: its values become 0.
  const at::Tensor usable = at::isfinite(scales).logical_and_(scales.ge(std::numeric_limits<float>::min()));
  scales = at::where(usable, scales, at::ones_like(scales));
  at::Tensor bytes = at::empty({float8_bytes(count)}, rows.options().dtype(at::kByte));
  bytes.narrow(0, 0, blocks * kFloat8Block).copy_(codes_of(rows.div_(scales)).view({-1}));
  bytes.narrow(0, blocks * kFloat8Block, blocks * static_cast<std::int64_t>(sizeof(float)))
      .view(at::kFloat)
      .copy_(scales.view({-1}));
  return bytes;
}

at::Tensor from_float8(const at::Tensor& bytes, std::int64_t values) {
  if (values == 0) return at::empty({0}, bytes.options().dtype(at::kFloat));
  const std::int64_t blocks = float8_blocks(values);
  const at::Tensor codes = bytes.narrow(0, 0, blocks * kFloat8Block).view({blocks, kFloat8Block});
  const at::Tensor scales =
      bytes.narrow(0, blocks * kFloat8Block, blocks * static_cast<std::int64_t>(sizeof(float)))
          .view(at::kFloat)
          .view({blocks, 1});
  return values_of(codes).mul_(scales).view({-1}).narrow(0, 0, values);
}

}  // namespace penstock
