// A hybrid model small enough for float64 and finite differences, whose parts all have an effect.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "penstock/hybrid.h"

namespace penstock::models::test {

inline HybridOptions small_hybrid(const std::string& pattern) {
  HybridOptions options{.pattern = pattern, .vocabulary = 19, .width = 16, .context = 24};
  options.heads = 4;
  options.key_value_heads = 2;
  options.feed_width = 24;
  options.state_size = 4;
  options.state_head_width = 8;
  options.state_chunk = 5;
  options.experts = 4;
  options.top_k = 2;
  options.expert_width = 12;
  options.balance_weight = 0.3;
  options.router_z_weight = 0.1;
  return options;
}

// Larger values than in training, so that every part has an effect.
inline void enlarge(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& item : module.named_parameters())
    if (item.value().dim() > 1) item.value().mul_(12);
}

inline HybridStage enlarged_stage(const HybridOptions& options, const StagePart& part,
                                  at::ScalarType dtype = at::kDouble, std::uint64_t seed = 7) {
  HybridStage stage(options, part);
  stage->to(dtype);
  stage->set_initial_values(seed);
  enlarge(*stage);
  return stage;
}

}  // namespace penstock::models::test
