// A hybrid language model, whole or as stages of a pipeline: attention, state-space, expert and feed-forward
// blocks in the order of a pattern.
//
//   models::HybridOptions options{.pattern = "AEME", .vocabulary = 256, .width = 128, .heads = 4};
//   models::HybridStage model(options);
//   model->set_initial_values(42);
//   at::Tensor logits = model->forward(tokens);  // [batch, length] -> [batch, length, vocabulary]
//   models::token_loss(logits, targets, double(targets.numel())).backward();
//
// Auxiliary losses of the blocks (balance and size of the routers' logits) enter the backward where they
// arise, weighted as the options say: the gradients are those of token_loss + sum of weight * loss, however
// the model is cut into stages.
//
// Mixtures of depths (depth_layers) choose tokens differently in training and evaluation mode: in training a
// fixed fraction of each row, which may depend on later tokens; in evaluation, like generation, the tokens
// that the router accepts, so that a validation loss is that of the model that generates.
//
// Multi-token prediction (multi_token_depth) adds its loss in training mode, at the last stage, which needs
// tokens and targets for it: call forward_with() with the keywords of TrainableModel::inputs().
//
// Parameters have the same names in every stage and layout: embed.weight, norm.weight, head.weight and
// blocks.I.NAME, where I counts the letters of the pattern and then the blocks of multi-token prediction;
// with the options for them also ngrams.weight, structure.NAME.weight, platform.weight, embed_norm.NAME,
// relations.weight, and multi_token.steps.D.NAME, the projections of multi-token prediction. A model of A
// blocks with attention_feed has the names of a transformer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/hybrid_metadata.h"
#include "penstock/hybrid_options.h"
#include "penstock/language_model.h"
#include "penstock/pytree.h"
#include "penstock/trainable_model.h"

namespace penstock::models {

// The module behind a HybridStage: the blocks of one stage, with the embedding at the first stage and the
// final norm and the head at the last one. A whole model is a single stage.
//
// A tied head has no weight of its own: it uses embed.weight, and so does multi-token prediction, for true
// tokens. If the last stage is not the first, it then holds a copy under the same name, and the gradients of
// both must be added (shared_parameters.h). The same holds for relations.weight, of which every stage with
// attention has a copy. In fake mode only shapes are computed. Thread safety: one thread at a time.
class HybridStageImpl : public ModelStage {
 public:
  // The whole model. Throws ConfigError for inconsistent options.
  explicit HybridStageImpl(const HybridOptions& options);
  // One part of it. Throws ConfigError for inconsistent options, ValueError if the model has no such part.
  HybridStageImpl(const HybridOptions& options, const StagePart& part);
  // Destroys the module.
  ~HybridStageImpl() override;

  // Returns hidden states [batch, length, width], at the last stage logits [batch, length, vocabulary].
  //
  // `x`: tokens [batch, length], Long or Int, at the first stage; hidden states at the others. `documents`:
  // integers [batch, length]; attention and states do not reach into another document. Undefined: each row is
  // one document; with bos_token the first stage begins documents at that token, and later stages, which see
  // no tokens, must be given the same documents (the trainer does that). Throws ValueError for other shapes,
  // for sequences that are longer than the context, and in training mode with gradients if the last stage
  // predicts several tokens.
  at::Tensor forward(at::Tensor x, at::Tensor documents = {});
  // The same with more that is known about the tokens (hybrid_metadata.h). Throws ValueError also for
  // metadata of another shape or dtype, and on the CPU for ids outside of their tables.
  at::Tensor forward_with(at::Tensor x, const HybridMetadata& metadata);
  // The same with keyword arguments, as pipelines pass them: none, or those of HybridMetadata::keywords()
  // and, for multi-token prediction, "tokens" and "targets", Long [batch, length].
  at::Tensor forward_with(at::Tensor x, const Tree& keywords) override;

  // Returns the auxiliary losses of the last forward of this stage, by name: the sum over the blocks of this
  // stage, divided by the number of blocks of the whole model that have this loss.
  const std::vector<AuxiliaryLoss>& auxiliary_losses() const;
  std::vector<AuxiliaryLoss> take_auxiliary_losses() override;
  Tree values_left_by_forward() override;
  void set_values_left_by_forward(const Tree& values) override;
  // Sets the factor of auxiliary losses in the backward, besides the loss scale of the step: 1 / runs of a
  // schedule whose gradients are accumulated. Default 1.
  void set_auxiliary_scale(double scale);

  // Returns the options, with zeros replaced by their defaults.
  const HybridOptions& options() const;
  // As in ModelStage.
  const StagePart& part() const override;
  std::int64_t context() const override { return options().context; }
  std::vector<std::shared_ptr<torch::nn::Module>> blocks() const override;
  void set_initial_values(std::uint64_t seed) override;
  // A cache has what n-grams, attention and states need of earlier tokens. Of the metadata of new tokens only
  // the ids of the structure embedding and the platforms are supported: they say nothing about other tokens.
  // Parts of the model whose metadata is not given contribute nothing. Throws NotImplemented for other
  // metadata.
  std::unique_ptr<StageCache> make_cache(std::int64_t capacity) const override;
  at::Tensor forward_cached(const at::Tensor& x, StageCache& cache) override;
  at::Tensor forward_cached_with(const at::Tensor& x, StageCache& cache, const Tree& keywords) override;
  // Tensor-parallel ranks split heads, feed-forward widths, the columns of experts and the vocabulary;
  // expert-parallel ranks divide the experts. Logits are then split over the vocabulary; token_loss() accepts
  // them.
  void parallelize(const comm::MeshGroups& mesh) override;
  void set_sequence_parallel() override;
  void set_replicas(const comm::Group& replicas) override;
  void set_recompute(const RecomputePlan& plan) override;
  at::Tensor separate_last_use(const std::string& tied) override;
  std::vector<StateBuffer> state_buffers() const override;
  void after_step(const FinishedStep& step) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
// A handle of a HybridStageImpl: copies share the module.
TORCH_MODULE(HybridStage);

}  // namespace penstock::models
