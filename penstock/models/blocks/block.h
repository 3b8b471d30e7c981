// One block of a transformer: x + attention(norm(x)), then x + feed(norm(x)).
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "penstock/models/blocks/attention.h"
#include "penstock/models/blocks/feed_forward.h"
#include "penstock/models/blocks/norm.h"
#include "penstock/transformer_options.h"

namespace penstock::models {

class BlockImpl : public torch::nn::Cloneable<BlockImpl> {
 public:
  // `number`: its index in the whole model, which identifies dropout masks and the entries of the cache.
  BlockImpl(const TransformerOptions& options, std::int64_t number);
  void reset() override;
  // [batch, length, width]. Dropout in training mode requires a step (penstock/step_context.h).
  at::Tensor forward(const at::Tensor& x, const AttentionContext& context);

  std::int64_t number() const { return number_; }

  RmsNorm attention_norm{nullptr};
  Attention attention{nullptr};
  RmsNorm feed_norm{nullptr};
  FeedForward feed{nullptr};

 private:
  TransformerOptions options_;
  std::int64_t number_;
  std::int64_t attention_drop_, feed_drop_;  // keys of the two dropout places (layer_from_name)
};
TORCH_MODULE(Block);

// Dropout at a named place of the model (layer_from_name), with the same mask in every layout, also for rows
// that are divided over ranks (split_rows.h). Does nothing in evaluation or for p = 0.
at::Tensor drop(const at::Tensor& x, double p, std::int64_t place, bool training);

}  // namespace penstock::models
