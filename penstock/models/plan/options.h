// The options of a decoder-only transformer, its number of parameters and its cost.
//
//   TransformerOptions options{.vocabulary = 256, .width = 128, .layers = 4, .heads = 4, .context = 256};
//   options.check();
//   parameter_count(options);              // of the whole model
//   training_flops_per_token(options, 256) * tokens_per_second / peak_flops;     // model FLOPs utilization
//
// A block is x + attention(norm(x)), then x + feed(norm(x)); norms are RMSNorm, positions rotary (RoPE), feed-forward SwiGLU, no biases.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace penstock::models {

struct TransformerOptions {
  std::int64_t vocabulary = 256;
  std::int64_t width = 128;
  std::int64_t layers = 4;
  std::int64_t heads = 4;             // query heads
  std::int64_t key_value_heads = 0;   // 0: same as heads; fewer: each serves a group of query heads
  std::int64_t feed_width = 0;        // 0: two thirds of 4 * width, rounded up to a multiple of 32
  std::int64_t context = 256;         // the longest sequence
  double rope_theta = 10000;          // base of the rotary frequencies
  double norm_epsilon = 1e-5;
  bool tie_head = false;              // the head uses the weight of the embedding
  double dropout = 0;                 // on the embedding and each half of a block, in training mode

  bool operator==(const TransformerOptions&) const = default;

  // Returns the options with zeros replaced by their defaults. Throws ConfigError that names the invalid
  // field and the remedy.
  TransformerOptions resolved() const;
  void check() const { resolved(); }
  std::int64_t head_width() const { return width / heads; }
};

// The parameters by their names in the whole model, in model order. The same in every layout; a tied head has
// none.
struct ParameterShape {
  std::string name;
  std::vector<std::int64_t> shape;
};
std::vector<ParameterShape> parameter_shapes(const TransformerOptions& options);

// A tied weight counts once.
std::int64_t parameter_count(const TransformerOptions& options);
std::int64_t block_parameter_count(const TransformerOptions& options);

// Operations of matrix products in one forward, per token, in sequences of `length`: two per multiply-add.
// Attention counts every pair of tokens although half of them are masked, as is usual for utilization. The
// embedding is a lookup and is not counted.
double block_flops_per_token(const TransformerOptions& options, std::int64_t length);
double head_flops_per_token(const TransformerOptions& options);
// Forward and backward: three times the forward.
double training_flops_per_token(const TransformerOptions& options, std::int64_t length);

}  // namespace penstock::models
