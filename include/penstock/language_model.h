// What training and using any language model needs: the loss of predicted tokens, sampling and generation.
//
//   models::TransformerOptions options{.vocabulary = 256, .width = 128, .layers = 4, .heads = 4};
//   models::TransformerStage model(options);
//   at::Tensor logits = model->forward(tokens);  // [batch, length, vocabulary]
//   models::token_loss(logits, targets, double(targets.numel())).backward();
//   at::Tensor text = models::generate(*model, tokens, {.max_tokens = 100, .temperature = 0.8});
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "penstock/random.h"
#include "penstock/trainable_model.h"

namespace penstock::models {

// ---- loss ----

// Targets with this value are not counted: padding, or prompts that are not learned.
inline constexpr std::int64_t kIgnoredTarget = -100;

// Returns the sum of the cross entropy over the counted targets, a scalar tensor. logits [..., vocabulary],
// plain or distributed; targets [...], Long. The loss is plain; 16-bit logits are summed in float32. Does not
// wait for the device. Throws ValueError for shapes that do not match.
at::Tensor token_loss_sum(const at::Tensor& logits, const at::Tensor& targets,
                          std::int64_t ignored = kIgnoredTarget);

// Returns the sum divided by `tokens`. Throws ValueError unless that is positive.
//
// A mean of means is not the mean if microbatches have different numbers of counted targets. Divide by the
// same number in all of them: with N counted targets in the batch of a step, M microbatches and D
// data-parallel ranks, N / (M * D). The mean over microbatches and ranks is then the sum over all tokens / N.
at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& targets, double tokens,
                      std::int64_t ignored = kIgnoredTarget);

// Returns the number of counted targets: a Long scalar tensor on the device of the targets.
at::Tensor counted_targets(const at::Tensor& targets, std::int64_t ignored = kIgnoredTarget);

// ---- generation ----

// How sample() chooses a token.
struct SampleOptions {
  double temperature = 1;  // 0: the most likely token
  std::int64_t top_k = 0;  // sample among this many of the most likely tokens (more if tied); 0: among all
};

// Returns the next token of each row: logits [batch, vocabulary] -> Long [batch], drawn from the softmax of
// logits / temperature. Throws ValueError for a negative temperature or top_k.
at::Tensor sample(const at::Tensor& logits, const SampleOptions& how, const RandomKey& key);

// How generate() works.
struct GenerateOptions {
  std::int64_t max_tokens = 100;                // number of new tokens
  double temperature = 1;                       // as in SampleOptions
  std::int64_t top_k = 0;                       // as in SampleOptions
  std::uint64_t seed = 0;                       // the same seed generates the same tokens
  std::optional<std::int64_t> stop_token = {};  // fills the rest of its row; all rows have it: the end
  bool use_cache = true;                        // keep state of earlier tokens instead of computing it again
  // Allows more tokens than the context: the model then sees the last ones, and each new token costs a whole
  // forward, because the cache holds keys by position.
  bool slide = false;
  // Returns keyword arguments for tokens [batch, length], of which the model is given those from `first` on:
  // their dim 1 is length - first. Called once for each forward, with all tokens so far. Empty: none. A model
  // must support them in forward_cached_with(), or use_cache must be false.
  std::function<Tree(const at::Tensor& tokens, std::int64_t first)> metadata = {};
};

// Receives the new token of each row and its position; returns false to end the generation.
using TokenCallback = std::function<bool(const std::vector<std::int64_t>& tokens, std::int64_t position)>;

// Returns the prompt and the tokens that follow it. prompt: Long [batch, length], at least one token, on the
// model's device. The model must be whole and is in evaluation mode during the call; a tensor-parallel one
// generates the same tokens on all ranks. Random numbers are a function of seed, position, row and vocabulary
// entry, so that the cache changes tokens only if rounding decides (logits differ by at most 1e-5 of their
// size in float32, 1e-12 in float64). Waits for the device once per token if there is a callback or a stop
// token, otherwise never. Throws StateError for one stage of several, ValueError for a bad prompt and for
// more tokens than fit into the context without `slide`.
at::Tensor generate(ModelStage& model, const at::Tensor& prompt, const GenerateOptions& how = {},
                    const TokenCallback& callback = {});

}  // namespace penstock::models
