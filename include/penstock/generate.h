// Text from a model, token by token.
//
//   GenerateOptions how{.max_tokens = 200, .temperature = 0.8, .top_k = 40, .seed = 7};
//   generate(*model, prompt, how, [](const std::vector<std::int64_t>& next, std::int64_t) { std::putchar(static_cast<int>(next[0])); return true; });
//
// The same seed gives the same tokens with and without the cache, up to ties that rounding decides (cached and uncached logits agree
// within 1e-5 of their size in float32, 1e-12 in float64). Random numbers are a function of (seed, position, row, vocabulary entry).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "penstock/transformer.h"
#include "penstock/random.h"

namespace penstock::models {

struct SampleOptions {
  double temperature = 1;   // 0: the most likely token
  std::int64_t top_k = 0;   // only among so many of the most likely ones (more where they tie); 0: among all
};

struct GenerateOptions {
  std::int64_t max_tokens = 100;
  double temperature = 1;
  std::int64_t top_k = 0;
  std::uint64_t seed = 0;
  std::optional<std::int64_t> stop_token = {};  // a row that has it goes on with nothing else; all rows have it: the end
  bool use_cache = true;
  // Prompt and new tokens may exceed the context: the model then sees the last `context` tokens. Each token beyond costs a whole pass over
  // them, as the cache holds keys by position.
  bool slide = false;
};

// The next token of each row: logits [batch, vocabulary] -> Long [batch]. By the largest of logit / temperature + Gumbel noise, which draws
// from the softmax. Throws ValueError for a negative temperature or top_k.
at::Tensor sample(const at::Tensor& logits, const SampleOptions& how, const RandomKey& key);

// Gets the new token of each row and its position; false ends the generation.
using TokenCallback = std::function<bool(const std::vector<std::int64_t>& tokens, std::int64_t position)>;

// prompt: Long [batch, length], at least one token, on the model's device. Gives the prompt and what was added. The model is whole and runs
// in evaluation mode meanwhile; tensor parallel ones give the same tokens on all ranks. Waits for the device once a token where there is
// a callback or a stop token, else not at all. Throws ValueError for prompt and max_tokens that do not fit into the context without `slide`.
at::Tensor generate(TransformerStageImpl& model, const at::Tensor& prompt, const GenerateOptions& how = {}, const TokenCallback& callback = {});

}  // namespace penstock::models
