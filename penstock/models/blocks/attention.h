// Causal attention with grouped queries, rotary positions and a window, without biases in its products.
//
//   Attention attention(options, 3);                    // block 3 of the model
//   y = attention->forward(x, {rotary.turns(0, length, x), AttentionMask::causal(length, length)});
//
// Query head h uses key head h / (heads / key_value_heads). A token attends to itself and the tokens before
// it, as far as the mask and the window of this layer allow (AttentionOptions). Under tensor
// parallelism (column parallel query, key, value; row parallel output) every rank computes its own heads, and
// one sum is sent in each direction.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>

#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/blocks/kv_cache.h"
#include "penstock/models/plan/attention_options.h"
#include "penstock/torch/kernels/attention_mask.h"

namespace penstock::models {

// Shared by all blocks of a forward.
struct AttentionContext {
  at::Tensor turns;          // rotary positions (rotary.h)
  AttentionMask mask;        // documents, padding and relation bias; windows belong to the layers
  KvCache* cache = nullptr;  // null: the keys are those of this forward
};

class AttentionImpl : public torch::nn::Cloneable<AttentionImpl> {
 public:
  // `block`: its index in the whole model, which selects its window and its entry in the cache, and whether
  // it uses positions.
  AttentionImpl(const AttentionOptions& options, std::int64_t block);
  void reset() override;
  // Fills the parameters as functions of seed and name; `name` is the block's ("blocks.3.attention").
  void initialize(const std::string& name, const BlockInit& init);
  // [batch, length, width]
  at::Tensor forward(const at::Tensor& x, const AttentionContext& context);

  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, output{nullptr};

 private:
  AttentionOptions options_;
  std::int64_t block_, window_;
  bool has_positions_;
};
TORCH_MODULE(Attention);

}  // namespace penstock::models
