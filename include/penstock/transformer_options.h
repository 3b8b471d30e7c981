// The options of a decoder-only transformer, and what follows from them without tensors: the shapes of its
// parameters and its cost. Its partition into stages is in model_plan.h.
//
//   models::TransformerOptions options{.vocabulary = 256, .width = 128, .layers = 4, .heads = 4};
//   options.check();
//   std::int64_t parameters = models::parameter_count(options);
//   double flops = models::training_flops_per_token(options, options.context);
//
// A block is x + attention(norm(x)), then x + feed(norm(x)). Norms are RMSNorm, positions are rotary (RoPE),
// the feed-forward part is SwiGLU, and there are no biases. Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/model_plan.h"

namespace penstock::models {

// Sizes and constants of a model.
struct TransformerOptions {
  std::int64_t vocabulary = 256;     // number of different tokens
  std::int64_t width = 128;          // elements of a hidden state; a multiple of `heads`
  std::int64_t layers = 4;           // number of blocks
  std::int64_t heads = 4;            // query heads
  std::int64_t key_value_heads = 0;  // 0: same as heads; fewer: each serves a group of query heads
  std::int64_t feed_width = 0;       // 0: two thirds of 4 * width, rounded up to a multiple of 32
  std::int64_t context = 256;        // the longest sequence
  double rope_theta = 10000;         // base of the rotary frequencies
  double norm_epsilon = 1e-5;        // added to the mean square in norms
  bool tie_head = false;             // the head uses the weight of the embedding
  double dropout = 0;                // on the embedding and each half of a block, in training mode

  // Compares all fields as they are; resolve both sides first if zeros and their defaults are to be equal.
  bool operator==(const TransformerOptions&) const = default;

  // Returns the options with zeros replaced by their defaults. Throws ConfigError that names the invalid
  // field and the remedy.
  TransformerOptions resolved() const;
  // Throws like resolved().
  void check() const { resolved(); }
  // Elements of one head.
  std::int64_t head_width() const { return width / heads; }

  // Returns what follows from the options for partitions, reports and memory. Throws like resolved().
  ModelPlan plan() const;
  // The same, so that functions of plans accept options.
  operator ModelPlan() const { return plan(); }
};

// Returns the number of elements of the parameters of one block.
std::int64_t block_parameter_count(const TransformerOptions& options);

// Returns the floating-point operations of the matrix products of one block per token in one forward, for
// sequences of `length`: two per multiply-add. Attention counts every pair of tokens although half of them
// are masked, as is usual for utilization.
double block_flops_per_token(const TransformerOptions& options, std::int64_t length);
// Returns the same for the head. The embedding is a lookup and is not counted.
double head_flops_per_token(const TransformerOptions& options);
// Returns the operations of the whole model per token, forward and backward: three times the forward.
double training_flops_per_token(const TransformerOptions& options, std::int64_t length);

}  // namespace penstock::models
