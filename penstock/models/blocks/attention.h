// Causal attention with rotary positions and grouped queries, without biases.
//
// Query head h uses key head h / (heads / key_value_heads). A token attends to itself and the tokens before
// it; with a document mask only to those of its own document. Under tensor parallelism (column parallel
// query, key, value; row parallel output) every rank computes its own heads, and one sum is sent in each
// direction.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "penstock/models/blocks/kv_cache.h"
#include "penstock/torch/kernels/fused_attention.h"
#include "penstock/transformer_options.h"

namespace penstock::models {

// Shared by all blocks of a forward.
struct AttentionContext {
  at::Tensor turns;  // rotary positions (rotary.h)
  AttentionMask mask;
  KvCache* cache = nullptr;  // null: the keys are those of this forward
};

class AttentionImpl : public torch::nn::Cloneable<AttentionImpl> {
 public:
  // `block`: its index in the whole model.
  AttentionImpl(const TransformerOptions& options, std::int64_t block);
  void reset() override;
  // [batch, length, width]
  at::Tensor forward(const at::Tensor& x, const AttentionContext& context);

  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, output{nullptr};

 private:
  TransformerOptions options_;
  std::int64_t block_;
};
TORCH_MODULE(Attention);

}  // namespace penstock::models
