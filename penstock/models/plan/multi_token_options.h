// Options of multi-token prediction: besides the next token, a model in training predicts the `depth` tokens
// after it. See penstock/models/blocks/multi_token_prediction.h.
//
//   MultiTokenOptions more{.depth = 1, .norm = {.width = 1024}};
//
// Plain values, independent of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/models/plan/norm_options.h"
#include "penstock/transformer_options.h"

namespace penstock::models {

struct MultiTokenOptions {
  std::int64_t depth = 1;  // model.multi_token_depth: how many tokens after the next one are predicted
  NormOptions norm = {};   // of hidden states and embeddings; its width is that of the model
  bool operator==(const MultiTokenOptions&) const = default;

  // Throws ConfigError that names the key.
  void check() const;
  // Without the blocks, and without embedding and head, which are the model's.
  std::vector<ParameterShape> shapes(const std::string& prefix) const;
  std::int64_t parameter_count() const;
  std::int64_t active_parameter_count() const { return parameter_count(); }
  // Of the projections. Blocks and heads cost their own operations, once for each depth.
  double flops_per_token(std::int64_t length) const;
};

}  // namespace penstock::models
