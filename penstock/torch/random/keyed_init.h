// Parameter initialization by key: a shard gets its part of the values that the whole parameter would get
// (keyed_random.h).
//
// Fans are those of the global shape, as torch::nn::init counts them: of a weight [out, in, kernel...], fan_in is in times the
// kernel's size, fan_out is out times the kernel's size.
//
//   const RandomKey key{.seed = 42, .layer = layer_from_name("blocks.3.mlp.weight"), .purpose = purpose::kInit};
//   keyed_kaiming_uniform_(shard, key, {.gain = std::sqrt(1.0 / 3)}, {.global_shape = {4096, 1024}, .offset = {1024, 0}});
//
// All run without recording derivatives. Throws ValueError for a weight of fewer than two dims, which has no
// fans.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "penstock/random.h"

namespace penstock {

struct Fans {
  std::int64_t in = 0;
  std::int64_t out = 0;
};
Fans fans_of(at::IntArrayRef global_shape);

enum class FanMode { In, Out };

struct KaimingOptions {
  double gain = 1.4142135623730951;  // of the activation after the layer: sqrt(2) for relu; see torch::nn::init::calculate_gain
  FanMode mode = FanMode::In;
};

// Standard deviation gain / sqrt(fan), as a uniform distribution [-b, b) with b = sqrt(3) * deviation, or as a normal one.
void keyed_kaiming_uniform_(const at::Tensor& weight, const RandomKey& key, const KaimingOptions& options = {}, const GlobalBox& box = {});
void keyed_kaiming_normal_(const at::Tensor& weight, const RandomKey& key, const KaimingOptions& options = {}, const GlobalBox& box = {});

// Standard deviation gain * sqrt(2 / (fan_in + fan_out)).
void keyed_xavier_uniform_(const at::Tensor& weight, const RandomKey& key, double gain = 1.0, const GlobalBox& box = {});
void keyed_xavier_normal_(const at::Tensor& weight, const RandomKey& key, double gain = 1.0, const GlobalBox& box = {});

// The initialization of torch::nn::Linear and Conv: weight and bias uniform in [-1 / sqrt(fan_in), 1 /
// sqrt(fan_in)). The bias must have a different key than the weight: purpose::kInit with the layer of its own
// name.
void keyed_linear_weight_(const at::Tensor& weight, const RandomKey& key, const GlobalBox& box = {});
void keyed_linear_bias_(const at::Tensor& bias, const RandomKey& key, std::int64_t fan_in, const GlobalBox& box = {});

}  // namespace penstock
