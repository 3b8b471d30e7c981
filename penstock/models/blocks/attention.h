// Causal attention with rotary positions and grouped queries, without biases.
//
// Query head h uses key head h / (heads / key_value_heads). A token sees the tokens before it and itself; with a document mask only those
// of its own document. Under tensor parallelism (column parallel query, key, value; row parallel output) every rank computes its own
// heads and one sum is sent each way.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "penstock/models/blocks/kv_cache.h"
#include "penstock/models/plan/options.h"
#include "penstock/torch/kernels/fused_attention.h"

namespace penstock::models {

// What is the same for all blocks of a forward.
struct AttentionContext {
  at::Tensor turns;          // of the rotary positions (rotary.h)
  AttentionMask mask;
  KvCache* cache = nullptr;  // none: the keys are those of this forward
};

class AttentionImpl : public torch::nn::Cloneable<AttentionImpl> {
 public:
  // `block`: its number in the whole model.
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
