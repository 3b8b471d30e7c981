// Random numbers that do not depend on how the work is split.
//
//   const std::int64_t layer = layer_from_name("blocks.3.mlp.weight");
//   const RandomKey key{.seed = 42, .layer = layer, .purpose = purpose::kInit};
//   at::Tensor whole = torch::empty({4096, 1024}), rows = torch::empty({512, 1024});
//   keyed_normal_(whole, key, 0.0, 0.02);
//   keyed_normal_(rows, key, 0.0, 0.02, {.global_shape = {4096, 1024}, .offset = {512 * world.rank(), 0}});
//   // rows now equals the same 512 rows of whole
//
// The value of an element is a pure function of a key (seed, step, microbatch, layer, purpose) and of the
// index of the element in the global tensor, in row-major order. It is bit for bit the same for every
// sharding of the tensor, pipeline split, memory format and number of threads, when it is computed again, and
// on the CPU and CUDA.
//
// All functions are dispatcher operators `penstock::keyed_*` (CPU, CUDA, shape-only, with derivatives), so
// modes, fake tensors, graph capture and distributed tensors support them. They do not change any generator.
//
// The Kaiming, Xavier and linear functions initialize parameters, each shard with its part of the values of
// the whole parameter. Fans are those of the global shape, as in torch::nn::init. These functions do not
// record gradients.
//
// Values are computed in float32 and rounded once to the dtype of the tensor (float32, float64, bfloat16,
// float16), so that changing the dtype changes the values by rounding only. docs/random.md specifies how
// values are derived and how accurate they are.
//
// Errors: ValueError for invalid parameters or a box that is not a part of its global shape, TypeError for a
// dtype that is not supported.
//
// Thread safety: all functions may be called from any thread. On CUDA they are enqueued on the current
// stream.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace penstock {

// Purposes of random numbers. Different purposes in one layer have independent numbers. Use your own from
// kFirstOfUser on.
namespace purpose {
inline constexpr std::int64_t kGeneral = 0;         // anything else
inline constexpr std::int64_t kDropout = 1;         // dropout masks
inline constexpr std::int64_t kInit = 2;            // initial values of parameters
inline constexpr std::int64_t kNoise = 3;           // noise that is added to values
inline constexpr std::int64_t kFirstOfUser = 1024;  // the first purpose that Penstock does not use
}  // namespace purpose

// Identifies a sequence of random numbers. Keys that differ in any member have unrelated numbers.
struct RandomKey {
  std::uint64_t seed = 0;                    // of the run
  std::int64_t step = 0;                     // optimizer step
  std::int64_t microbatch = -1;              // -1: not specific to a microbatch
  std::int64_t layer = 0;                    // index or layer_from_name in the whole model, not in a stage
  std::int64_t purpose = purpose::kGeneral;  // what the numbers are for

  // Whether all members are equal.
  bool operator==(const RandomKey&) const = default;
  // Returns the members in order, as the dispatcher operators take them.
  std::vector<std::int64_t> to_ints() const;
};

// Returns a number for a name, the same on every machine (64-bit FNV-1a). Use the name in the whole model:
// names that are relative to a pipeline stage would change the numbers with the split.
std::int64_t layer_from_name(std::string_view name);

// The part of a global tensor that a local tensor is: elements [offset, offset + local sizes). If both
// members are empty, the local tensor is the whole global tensor.
struct GlobalBox {
  std::vector<std::int64_t> global_shape;  // sizes of the global tensor
  std::vector<std::int64_t> offset;        // index of the first local element in each dim

  // Whether the local tensor is the whole global tensor.
  bool whole() const { return global_shape.empty() && offset.empty(); }
};

// The precision in which values are computed.
enum class Precision {
  Single,  // float32, rounded to the dtype of the tensor
  Double   // float64, for float64 tensors only; different values, not those of Single with more digits
};

// Fills a tensor with values uniform in [low, high) and returns it. `high` itself appears only if rounding to
// a 16-bit dtype reaches it.
const at::Tensor& keyed_uniform_(const at::Tensor& tensor, const RandomKey& key, double low, double high,
                                 const GlobalBox& box = {}, Precision precision = Precision::Single);

// Fills a tensor with normally distributed values and returns it. Values are within 6.34 standard deviations
// of the mean (Precision::Single) or 9.16 (Precision::Double).
const at::Tensor& keyed_normal_(const at::Tensor& tensor, const RandomKey& key, double mean,
                                double standard_deviation, const GlobalBox& box = {},
                                Precision precision = Precision::Single);

// Fills a tensor with values of a normal distribution truncated to [low, high] and returns it. Uses the
// quantile function and rejects no numbers. Throws ValueError if the interval contains fewer than 2^16
// different values (Precision::Single: about 4 standard deviations from the mean).
const at::Tensor& keyed_trunc_normal_(const at::Tensor& tensor, const RandomKey& key, double mean,
                                      double standard_deviation, double low, double high,
                                      const GlobalBox& box = {}, Precision precision = Precision::Single);

// Fills a tensor, which may be of dtype bool, with 1 with probability p and 0 otherwise, and returns it. The
// resolution of p is 2^-32.
const at::Tensor& keyed_bernoulli_(const at::Tensor& tensor, const RandomKey& key, double p,
                                   const GlobalBox& box = {});

// Returns the elements that keyed_dropout keeps: a bool tensor with the sizes and device of `input`.
at::Tensor keyed_keep_mask(const at::Tensor& input, double p, const RandomKey& key,
                           const GlobalBox& box = {});

// Returns `input` with each element zeroed with probability p and divided by 1 - p otherwise: multiplied by
// float32(1 / (1 - p)) in float32 and rounded once (float64 inputs: in float64). A dropped element is 0 for
// every input, including NaN. The mask is the same for all dtypes. The derivative computes the mask again, so
// nothing is saved for backward. Can be differentiated any number of times.
at::Tensor keyed_dropout(const at::Tensor& input, double p, const RandomKey& key, const GlobalBox& box = {});

// Ensures that the operators are linked into a program that calls them only by name.
void register_random_operators();

// ---- initialization ----

// The fans of a weight of shape [out, in, kernel...].
struct Fans {
  std::int64_t in = 0;   // in times the number of elements of the kernel
  std::int64_t out = 0;  // out times the number of elements of the kernel
};
// Returns the fans of a weight of this global shape. Throws ValueError for fewer than two dims.
Fans fans_of(at::IntArrayRef global_shape);

// Which fan determines the standard deviation.
enum class FanMode {
  In,  // keeps the variance of activations in forward
  Out  // keeps the variance of gradients in backward
};

// Options of Kaiming initialization.
struct KaimingOptions {
  double gain = 1.4142135623730951;  // of the next activation (torch::nn::init::calculate_gain); relu: this
  FanMode mode = FanMode::In;        // which fan is used
};

// Fills a weight with values uniform in [-b, b), where b = sqrt(3) * gain / sqrt(fan). Throws ValueError for
// a weight of fewer than two dims.
void keyed_kaiming_uniform_(const at::Tensor& weight, const RandomKey& key,
                            const KaimingOptions& options = {}, const GlobalBox& box = {});
// Fills a weight with normally distributed values of standard deviation gain / sqrt(fan). Throws as above.
void keyed_kaiming_normal_(const at::Tensor& weight, const RandomKey& key, const KaimingOptions& options = {},
                           const GlobalBox& box = {});

// Fills a weight with values uniform in [-b, b), where b = sqrt(3) * gain * sqrt(2 / (fan_in + fan_out)).
// Throws as above.
void keyed_xavier_uniform_(const at::Tensor& weight, const RandomKey& key, double gain = 1.0,
                           const GlobalBox& box = {});
// Fills a weight with normally distributed values of standard deviation gain * sqrt(2 / (fan_in + fan_out)).
// Throws as above.
void keyed_xavier_normal_(const at::Tensor& weight, const RandomKey& key, double gain = 1.0,
                          const GlobalBox& box = {});

// Fills a weight as torch::nn::Linear and Conv do: uniform in [-1 / sqrt(fan_in), 1 / sqrt(fan_in)). Throws
// as above.
void keyed_linear_weight_(const at::Tensor& weight, const RandomKey& key, const GlobalBox& box = {});
// Fills the bias of such a layer: uniform in the same interval. Its key must differ from that of the weight:
// use the layer_from_name of the bias.
void keyed_linear_bias_(const at::Tensor& bias, const RandomKey& key, std::int64_t fan_in,
                        const GlobalBox& box = {});

}  // namespace penstock
