// A decoder-only transformer, whole or as stages of a pipeline: model, initial values, loss and generation.
//
//   models::TransformerOptions options{.vocabulary = 256, .width = 128, .layers = 4, .heads = 4};
//   models::TransformerStage model(options);
//   models::initialize(*model, {.seed = 42});
//   at::Tensor logits = model->forward(tokens);  // [batch, length] -> [batch, length, vocabulary]
//   models::token_loss(logits, targets, double(targets.numel())).backward();
//   at::Tensor text = models::generate(*model, tokens, {.max_tokens = 100, .temperature = 0.8});
//
//   models::TransformerOptions options{.vocabulary = 256, .width = 128, .layers = 4, .heads = 4};
//   models::TransformerStage second(options, models::partition_model(options, 2)[1]);
//   auto call = [second](at::Tensor x, Tree more) mutable { return second->forward_with(x, more); };
//   PipelineStage stage(StageModule(call, {second.ptr()}), 1, 2, at::kCPU);
//
// Parameters have the same names in every stage and layout: embed.weight, norm.weight, head.weight, and
// blocks.I.NAME.weight, where I counts over the whole model and NAME is attention_norm, attention.query,
// attention.key, attention.value, attention.output, feed_norm, feed.gate, feed.up or feed.down.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/pytree.h"
#include "penstock/random.h"
#include "penstock/transformer_options.h"
#include "penstock/world.h"

namespace penstock::models {

// The module behind a TransformerStage: the blocks of one stage, with the embedding at the first stage and
// the final norm and the head at the last one. A whole model is a single stage.
//
// A tied head has no weight of its own: it uses embed.weight. If the last stage is not the first, it holds a
// copy under the same name, and the gradients of both must be added (stages_of_parameter).
//
// Inputs may be distributed tensors (parallelize_transformer). In fake mode only shapes are computed. On CUDA
// nothing waits for the device except the first forward on a device. Thread safety: one thread at a time.
class TransformerStageImpl : public torch::nn::Module {
 public:
  // The whole model. Throws ConfigError for inconsistent options.
  explicit TransformerStageImpl(const TransformerOptions& options);
  // One part of it. Throws ConfigError for inconsistent options, ValueError if the model has no such part.
  TransformerStageImpl(const TransformerOptions& options, const StagePart& part);
  // Destroys the module.
  ~TransformerStageImpl() override;

  // Returns hidden states [batch, length, width], at the last stage logits [batch, length, vocabulary].
  //
  // `x`: tokens [batch, length], Long or Int, at the first stage; hidden states at the others. `documents`:
  // integers [batch, length]; a token sees only tokens with its own number, so that several texts can share
  // a row; the logits of a document are those that it would have alone in a row, up to rounding. Undefined:
  // each row is one document. Throws ValueError for other shapes and for sequences that are
  // longer than the context, StateError for dropout in training mode outside of a step (step_context.h).
  at::Tensor forward(at::Tensor x, at::Tensor documents = {});
  // The same with keyword arguments, as pipelines pass them: a dict with "documents", or none.
  at::Tensor forward_with(at::Tensor x, const Tree& keywords);

  // Returns the options, with zeros replaced by their defaults.
  const TransformerOptions& options() const;
  // Returns the part of the model that this stage is.
  const StagePart& part() const;
  // Returns whether this stage is the whole model.
  bool is_whole() const { return part().has_embed() && part().has_head(); }
  // Returns the blocks of this stage in model order, for example for fully_shard.
  std::vector<std::shared_ptr<torch::nn::Module>> blocks() const;
  // Returns the weight of the head: head.weight, or embed.weight if tied. Throws StateError if this is not
  // the last stage.
  const at::Tensor& head_weight() const;

  torch::nn::Embedding embed{nullptr};  // at the first stage, and at the last one if the head is tied
  torch::nn::Linear head{nullptr};      // at the last stage, unless tied

 private:
  friend struct TransformerAccess;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
// A handle of a TransformerStageImpl: copies share the module.
TORCH_MODULE(TransformerStage);

// [collective over the mesh] Splits the parameters of a stage over the ranks of a mesh axis (tensor
// parallelism): heads, the inner width of the feed-forward part and the vocabulary. Norms are replicated.
// With a mesh of one axis, inputs are plain tensors, the same on all its ranks; with one axis of several they
// are distributed tensors. Hidden states are returned in the same form, logits as a distributed tensor split
// over the vocabulary. Throws ConfigError if the axis does not divide heads and key_value_heads.
void parallelize_transformer(TransformerStageImpl& stage, const comm::MeshGroups& mesh,
                             const std::string& axis = {});

// ---- initial values ----

// How initialize() chooses values.
struct InitOptions {
  std::uint64_t seed = 0;      // of the random numbers
  double deviation = 0.02;     // standard deviation of matrices
  bool scale_residual = true;  // divides that of attention.output and feed.down by sqrt(2 * layers)
};

// Sets matrices to normally distributed values and norms to 1. A value is a function of seed, parameter name
// and element, hence the same bits in every layout and on every device; for sharded parameters each rank
// computes its own part. Throws ValueError for a deviation that is not positive.
void initialize(TransformerStageImpl& stage, const InitOptions& how = {});

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
  bool use_cache = true;                        // keep keys and values instead of computing them again
  // Allows more tokens than the context: the model then sees the last ones, and each new token costs a whole
  // forward, because the cache holds keys by position.
  bool slide = false;
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
at::Tensor generate(TransformerStageImpl& model, const at::Tensor& prompt, const GenerateOptions& how = {},
                    const TokenCallback& callback = {});

}  // namespace penstock::models
