// One letter of a hybrid model: x + block(norm(x)), where the block is attention, state space, experts or
// feed-forward. With attention_feed an attention block has a second residual, a feed-forward. A mixture of
// depths may wrap it: only some tokens go through the block, see routed_context.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>

#include "penstock/models/blocks/any_norm.h"
#include "penstock/models/blocks/attention.h"
#include "penstock/models/blocks/block_result.h"
#include "penstock/models/blocks/depth_cache.h"
#include "penstock/models/blocks/experts.h"
#include "penstock/models/blocks/feed_forward.h"
#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/blocks/mixture_of_depths.h"
#include "penstock/models/blocks/state_space.h"
#include "penstock/models/blocks/tree_feed_forward.h"
#include "penstock/models/plan/hybrid_parts.h"

namespace penstock::models {

// Shared by all blocks of a forward.
struct HybridContext {
  AttentionContext attention;
  at::Tensor documents;               // [batch, length]; undefined: each row is one document
  StateSpaceCache* states = nullptr;  // for generation; null: rows begin with this forward
  at::Tensor parents = {};            // [batch, length], for feed-forwards along the tree; undefined: none
  at::Tensor valid = {};              // Bool [batch, length]: tokens that are not padding; undefined: all
  DepthCache* depths = nullptr;       // with `states`, for blocks that a mixture of depths wraps
  at::Tensor counted;                 // Long [batch]: the tokens that `states` remembers; undefined: all
};

class HybridBlockImpl : public torch::nn::Module {
 public:
  // `number`: its index in the whole model, which identifies dropout masks and the entries of caches.
  HybridBlockImpl(const HybridOptions& options, const HybridParts& parts, std::int64_t number);

  // x [batch, length, width], plain or with tokens that are divided over ranks (split_rows.h); so is the
  // result. Dropout in training mode requires a step (penstock/step_context.h).
  BlockResult forward(const at::Tensor& x, const HybridContext& context);
  // Fills the parameters as functions of seed and name.
  void initialize(const BlockInit& init);

  std::int64_t number() const { return number_; }
  BlockKind kind() const { return kind_; }
  // The experts of an E block; empty in others.
  const Experts& experts() const { return experts_; }

 private:
  // What the residuals of the block add to x, and its losses.
  BlockResult first_addition(const at::Tensor& x, const HybridContext& context);
  at::Tensor second_addition(const at::Tensor& sum, const HybridContext& context);
  BlockResult addition(const at::Tensor& x, const HybridContext& context);
  BlockResult forward_routed(const at::Tensor& x, const HybridContext& context);
  bool has_second() const { return kind_ == BlockKind::Attention && has_feed(); }
  // What a residual adds, with dropout.
  at::Tensor dropped(const at::Tensor& added, const char* residual) const;
  void register_feed(const HybridOptions& options);
  bool has_feed() const { return !feed_.is_empty() || !tree_feed_.is_empty(); }
  at::Tensor feed(const at::Tensor& in, const HybridContext& context);

  double dropout_;
  std::int64_t number_, window_ = 0;
  BlockKind kind_;
  AnyNorm first_norm_, feed_norm_;
  Attention attention_{nullptr};
  StateSpace state_space_{nullptr};
  Experts experts_{nullptr};
  // One of them, or none.
  FeedForward feed_{nullptr};
  TreeFeedForward tree_feed_{nullptr};
  MixtureOfDepths depth_{nullptr};
};
TORCH_MODULE(HybridBlock);

}  // namespace penstock::models
