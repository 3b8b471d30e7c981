// A small model and tokens for the tests of this folder.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "penstock/transformer.h"

namespace penstock::models::test {

inline TransformerOptions small(bool tie_head = false) {
  return {.vocabulary = 19,
          .width = 16,
          .layers = 3,
          .heads = 4,
          .key_value_heads = 2,
          .feed_width = 24,
          .context = 12,
          .tie_head = tie_head};
}

// Larger deviations than in training, so that every part has an effect.
inline TransformerStage made(const TransformerOptions& options, at::ScalarType dtype = at::kDouble) {
  TransformerStage model(options);
  model->to(dtype);
  initialize(*model, {.seed = 5, .deviation = 0.3});
  return model;
}
inline TransformerStage made(const TransformerOptions& options, const StagePart& part,
                             at::ScalarType dtype = at::kDouble) {
  TransformerStage model(options, part);
  model->to(dtype);
  initialize(*model, {.seed = 5, .deviation = 0.3});
  return model;
}

inline at::Tensor tokens_for(const TransformerOptions& options, std::int64_t batch, std::int64_t length,
                             std::uint64_t seed = 1) {
  return at::randint(0, options.vocabulary, {batch, length}, at::detail::createCPUGenerator(seed),
                     at::TensorOptions(at::kLong));
}

inline at::Tensor numbers(const std::vector<std::vector<std::int64_t>>& rows) {
  std::vector<at::Tensor> all;
  for (const auto& row : rows) all.push_back(torch::tensor(row, at::kLong));
  return at::stack(all);
}

using Gradients = std::map<std::string, at::Tensor>;
// Summed where two stages hold the same parameter.
inline void collect(const torch::nn::Module& module, Gradients& all) {
  for (const auto& item : module.named_parameters()) {
    at::Tensor& mine = all[item.key()];
    mine = mine.defined() ? mine + item.value().grad() : item.value().grad();
  }
}

inline double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace penstock::models::test
