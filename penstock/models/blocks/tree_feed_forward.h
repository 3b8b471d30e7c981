// Feed-forward that mixes along the syntax tree: every token gets a part of the state of its parent, then
// SwiGLU.
//
//   h = x + mix * x[parent]                  elementwise, mix [width]; 0 for tokens without a parent
//   y = down(silu(gate(h)) * up(h))
//
//   TreeFeedForward feed(TreeFeedOptions{.width = 1024, .feed_width = 2816});
//   y = feed->forward(norm->forward(x), {.parents = parents});
//
// `mix` is learnt and 0 at first: the block starts as a plain feed-forward, and mix has a gradient from the
// first step. Parents are places in the row, before the token (in reading order a node follows its parent),
// or -1; without parents at all the block is a plain feed-forward. On the CPU any other parent is a
// ValueError. On a device values are not read: there a parent that is not before its token counts as none, so
// that the block is causal whatever the metadata says. Parents in another document count as none if documents
// are given. Without biases. Nothing waits for the device.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <string>

#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/plan/tree_feed_options.h"

namespace penstock::models {

struct TreeContext {
  // Long or Int [batch, length]: places counted from the first of `earlier`; -1: none. Undefined: no token
  // has a parent.
  at::Tensor parents = {};
  at::Tensor documents = {};  // undefined, or integers [batch, h + length], those of `earlier` first
  // For generation: the inputs x of the h tokens before [batch, h, width]. Undefined: none.
  at::Tensor earlier = {};
};

class TreeFeedForwardImpl : public torch::nn::Cloneable<TreeFeedForwardImpl> {
 public:
  // Throws ConfigError for options that are not valid.
  explicit TreeFeedForwardImpl(const TreeFeedOptions& options);
  void reset() override;
  // `name`: of this module in the model.
  void initialize(const std::string& name, const BlockInit& init);
  // x [batch, length, width]. Products run under autocast; the mixture has the dtype of x. Throws ValueError
  // for metadata of another shape or dtype.
  at::Tensor forward(const at::Tensor& x, const TreeContext& context);

  const TreeFeedOptions& options() const { return options_; }

  at::Tensor mix;  // [width]
  torch::nn::Linear gate{nullptr}, up{nullptr}, down{nullptr};

 private:
  // x + mix * x[parent], for whole rows of this rank.
  at::Tensor with_parents(const at::Tensor& own, const at::Tensor& own_mix, const TreeContext& context) const;

  TreeFeedOptions options_;
};
TORCH_MODULE(TreeFeedForward);

}  // namespace penstock::models
