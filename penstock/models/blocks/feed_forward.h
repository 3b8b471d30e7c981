// The feed-forward half of a block, SwiGLU: down(silu(gate(x)) * up(x)), without biases.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "penstock/transformer_options.h"

namespace penstock::models {

class LocalRegion;

class FeedForwardImpl : public torch::nn::Cloneable<FeedForwardImpl> {
 public:
  explicit FeedForwardImpl(const TransformerOptions& options);
  FeedForwardImpl(std::int64_t width, std::int64_t feed_width);
  void reset() override;
  // [batch, length, width]
  at::Tensor forward(const at::Tensor& x);
  // Within a region that others share: what this rank adds to the sum. `in`: as forward() casts it.
  at::Tensor terms(const LocalRegion& region, const at::Tensor& in) const;

  torch::nn::Linear gate{nullptr}, up{nullptr}, down{nullptr};

 private:
  std::int64_t width_, feed_width_;
};
TORCH_MODULE(FeedForward);

}  // namespace penstock::models
