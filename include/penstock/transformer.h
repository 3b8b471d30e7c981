// A decoder-only transformer, whole or as stages of a pipeline: model and initial values. Loss and generation
// are in language_model.h.
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
#include <memory>
#include <string>
#include <vector>

#include "penstock/language_model.h"
#include "penstock/pytree.h"
#include "penstock/trainable_model.h"
#include "penstock/transformer_options.h"
#include "penstock/world.h"

namespace penstock::models {

// The module behind a TransformerStage: the blocks of one stage, with the embedding at the first stage and
// the final norm and the head at the last one. A whole model is a single stage.
//
// A tied head has no weight of its own: it uses embed.weight. If the last stage is not the first, it holds a
// copy under the same name, and the gradients of both must be added (shared_parameters.h).
//
// Inputs may be distributed tensors (parallelize_transformer). In fake mode only shapes are computed. On CUDA
// nothing waits for the device except the first forward on a device. Thread safety: one thread at a time.
class TransformerStageImpl : public ModelStage {
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
  at::Tensor forward_with(at::Tensor x, const Tree& keywords) override;

  // Returns the options, with zeros replaced by their defaults.
  const TransformerOptions& options() const;
  // Returns the part of the model that this stage is.
  const StagePart& part() const override;
  // Returns the blocks of this stage in model order, for example for fully_shard.
  std::vector<std::shared_ptr<torch::nn::Module>> blocks() const override;
  // Returns the weight of the head: head.weight, or embed.weight if tied. Throws StateError if this is not
  // the last stage.
  const at::Tensor& head_weight() const;

  std::int64_t context() const override { return options().context; }
  // As in ModelStage: initialize(), parallelize_transformer(), a cache of keys and values, and the head of a
  // whole model with a tied weight as its own autograd leaf.
  void set_initial_values(std::uint64_t seed) override;
  void parallelize(const comm::MeshGroups& mesh) override;
  void set_sequence_parallel() override;
  void set_recompute(const RecomputePlan& plan) override;
  std::unique_ptr<StageCache> make_cache(std::int64_t capacity) const override;
  at::Tensor forward_cached(const at::Tensor& x, StageCache& cache) override;
  at::Tensor separate_last_use(const std::string& tied) override;

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

}  // namespace penstock::models
