// Random numbers that do not depend on how the work is split.
//
// The value of an element is a pure function of a key (seed, step, microbatch, layer, purpose) and of the element's index in
// the global tensor, in row-major order. It is the same for every sharding of that tensor, every pipeline split, every
// memory format, every number of threads, when computed again, and on the CPU and on CUDA: bit for bit.
//
//   const RandomKey key{.seed = 42, .layer = layer_from_name("blocks.3.mlp.weight"), .purpose = purpose::kInit};
//   keyed_normal_(weight, key, 0.0, 0.02);                                          // the whole tensor
//   keyed_normal_(my_rows, key, 0.0, 0.02, {.global_shape = {4096, 1024}, .offset = {rank * 512, 0}});  // the same values
//
// Everything here is a dispatcher operator `penstock::keyed_*` (CPU, CUDA, shape-only, with derivatives), so that modes, fake
// tensors, graph capture and distributed tensors see ordinary operators. They are pure: the operators change no generator.
//
// Values are computed in float32 and rounded once into the dtype of the tensor (float32, float64, bfloat16, float16), so the
// dtypes of a model can change without changing its numbers by more than the rounding. Precision::Double computes in
// float64 and is for float64 tensors alone; its values are other numbers, not the same ones with more digits.
// How keys, counters and values are derived, and how accurate they are: docs/random.md.
//
// Thread rule: every function may be called from any thread. On CUDA it is enqueued on the current stream.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace penstock {

// What numbers are for. Two purposes under one layer never share numbers. Add your own from kFirstOfUser on.
namespace purpose {
inline constexpr std::int64_t kGeneral = 0;
inline constexpr std::int64_t kDropout = 1;
inline constexpr std::int64_t kInit = 2;
inline constexpr std::int64_t kNoise = 3;
inline constexpr std::int64_t kFirstOfUser = 1024;
}  // namespace purpose

// Names a sequence of numbers. Every part counts: keys that differ anywhere give unrelated numbers.
struct RandomKey {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t microbatch = -1;  // -1: not of one microbatch
  std::int64_t layer = 0;        // position or name (layer_from_name) in the whole model, not in a stage
  std::int64_t purpose = purpose::kGeneral;

  bool operator==(const RandomKey&) const = default;
  std::vector<std::int64_t> to_ints() const;  // as the operators take it
};

// A number for a name, the same everywhere (FNV-1a, 64 bits). Use the name in the whole model: a pipeline stage that counts its
// own layers would give other numbers for other splits.
std::int64_t layer_from_name(std::string_view name);

// Which part of the global tensor a local tensor is: elements [offset, offset + local sizes) of `global_shape`.
// Empty: the local tensor is all of it.
struct GlobalBox {
  std::vector<std::int64_t> global_shape;
  std::vector<std::int64_t> offset;

  bool whole() const { return global_shape.empty() && offset.empty(); }
};

enum class Precision { Single, Double };

// Uniform in [low, high): the bound itself appears only where rounding to a 16-bit dtype reaches it.
const at::Tensor& keyed_uniform_(const at::Tensor& tensor, const RandomKey& key, double low, double high,
                                 const GlobalBox& box = {}, Precision precision = Precision::Single);

// Within 6.34 standard deviations of the mean (float32) or 9.16 (float64).
const at::Tensor& keyed_normal_(const at::Tensor& tensor, const RandomKey& key, double mean, double standard_deviation,
                                const GlobalBox& box = {}, Precision precision = Precision::Single);

// Normal, given that it lies in [low, high]: the quantile function on the part of [0, 1) that belongs to the interval; no
// number is thrown away. Refused where fewer than 2^16 different values are left (float32: about 4 deviations off the mean).
const at::Tensor& keyed_trunc_normal_(const at::Tensor& tensor, const RandomKey& key, double mean, double standard_deviation,
                                      double low, double high, const GlobalBox& box = {},
                                      Precision precision = Precision::Single);

// 1 with probability p, else 0. Also for bool tensors. p is resolved to 2^-32.
const at::Tensor& keyed_bernoulli_(const at::Tensor& tensor, const RandomKey& key, double p, const GlobalBox& box = {});

// What dropout with this key and box keeps: a bool tensor with the sizes and the device of `input`.
at::Tensor keyed_keep_mask(const at::Tensor& input, double p, const RandomKey& key, const GlobalBox& box = {});

// Zero with probability p, else input / (1 - p): multiplied by float32(1 / (1 - p)) in float32 and rounded once (float64: in
// float64). A dropped element is 0 whatever the input is, NaN included. The mask is the same for all dtypes.
// The derivative computes the mask again: nothing is kept from forward to backward. May be differentiated any number of times.
at::Tensor keyed_dropout(const at::Tensor& input, double p, const RandomKey& key, const GlobalBox& box = {});

// Makes sure that the operators are linked in, for programs that call them by name alone.
void register_random_operators();

// ---- initialization ----
//
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
