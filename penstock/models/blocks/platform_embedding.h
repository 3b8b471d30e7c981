// Platform embedding: the number of the platform for which a row of code is written, or of each of its
// tokens, selects a row of a table, which is added to the embedding of the tokens.
//
//   PlatformEmbedding platform(PlatformOptions{.width = 1024, .platforms = 12});
//   x = platform->forward(x, platform_ids);              // [batch] or [batch, length]
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <string>

#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/plan/structure_options.h"

namespace penstock::models {

class PlatformEmbeddingImpl : public torch::nn::Cloneable<PlatformEmbeddingImpl> {
 public:
  // Throws ConfigError for options that are not valid.
  explicit PlatformEmbeddingImpl(const PlatformOptions& options);
  void reset() override;
  // `name`: of this module in the model.
  void initialize(const std::string& name, const BlockInit& init);
  // x [batch, length, width]; ids Long or Int [batch] or [batch, length]. Returns the sum in the dtype of x,
  // computed in float32 (float64 for float64). Throws ValueError for other shapes, and on the CPU for an id
  // outside of the table.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ids);

  const PlatformOptions& options() const { return options_; }

  at::Tensor weight;  // [platforms, width]

 private:
  PlatformOptions options_;
};
TORCH_MODULE(PlatformEmbedding);

}  // namespace penstock::models
