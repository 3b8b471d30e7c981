// A decoder-only transformer, whole or a stage of it.
//
//   TransformerOptions options{.vocabulary = 256, .width = 128, .layers = 4, .heads = 4, .context = 256};
//   TransformerStage model(options);                                        // whole
//   initialize(*model, {.seed = 42});                                       // initialize.h: the same values in every layout
//   auto logits = model->forward(tokens, documents);                        // [batch, length] -> [batch, length, vocabulary]
//
//   auto parts = partition_model(options, 2);                               // stage_parts.h
//   TransformerStage stage(options, parts[1]);                              // only its blocks; parameters keep their names in the model
//   PipelineStage(StageModule([stage](at::Tensor x, Tree more) mutable { return stage->forward_with(x, more); }, {stage.ptr()}), 1, 2, device);
//
// Names of parameters are global: embed.weight, blocks.<i>.attention_norm.weight, blocks.<i>.attention.{query,key,value,output}.weight,
// blocks.<i>.feed_norm.weight, blocks.<i>.feed.{gate,up,down}.weight, norm.weight, head.weight; i counts over the whole model. A tied head
// has no weight of its own: it uses embed.weight, and a last stage without the embedding holds a copy of that name, whose gradient the
// owner of the stages adds to that of the first stage (stages_of_parameter tells which these are).
//
// Documents [batch, length] are integers; a token sees only tokens of its own number. Undefined: the whole row is one document. Positions
// count from the begin of the row: rotary positions are relative, so a document's logits do not depend on where it stands, up to rounding.
//
// Tensor parallel: parallel_plan.h. Inputs then are plain (the same on all ranks of the axis) or distributed; hidden states come out as
// the inputs were, logits as a distributed tensor split over the vocabulary, which token_loss() takes as it is.
// In fake mode it runs in shape only. On CUDA nothing waits for the device, but the first forward on a device. One thread uses a model.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

#include "penstock/models/blocks/block.h"
#include "penstock/models/blocks/kv_cache.h"
#include "penstock/models/blocks/norm.h"
#include "penstock/transformer_options.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/model_partition.h"
#include "penstock/pytree.h"

namespace penstock::models {

class TransformerStageImpl : public torch::nn::Module {
 public:
  explicit TransformerStageImpl(const TransformerOptions& options) : TransformerStageImpl(options, whole_model(options)) {}
  // Throws ConfigError for options that contradict each other, ValueError for a part that is none of the model.
  TransformerStageImpl(const TransformerOptions& options, const StagePart& part);

  // `x`: tokens [batch, length], integers, at the first stage; else hidden states [batch, length, width]. Gives hidden states, at the last
  // stage logits. Throws ValueError for other shapes and for sequences longer than the context.
  at::Tensor forward(at::Tensor x, at::Tensor documents = {});
  // The same with keyword arguments: "documents", or none.
  at::Tensor forward_with(at::Tensor x, const Tree& keywords);
  // Tokens behind those that the cache holds; they are added to it. No graph is recorded. Works stage by stage: each with its own cache.
  at::Tensor forward_cached(at::Tensor x, KvCache& cache);

  const TransformerOptions& options() const { return options_; }
  const StagePart& part() const { return part_; }
  bool is_whole() const { return part_.has_embed() && part_.has_head(); }
  const std::vector<Block>& blocks() const { return blocks_; }
  // What the head multiplies with: head.weight, or embed.weight when tied.
  const at::Tensor& head_weight() const;
  // Of a whole model with a tied head: gives the head a leaf of its own, the parameter `tied_head`, with the memory of embed.weight. Each
  // use then gathers its own gradient, as it does where they are on two stages, and whoever calls this adds the two. After the weights
  // have their final place (initialize, parallelize). Throws StateError for other stages.
  void separate_head();
  static constexpr const char* kTiedHead = "tied_head";

  torch::nn::Embedding embed{nullptr};  // at the first stage, and at the last one for a tied head
  RmsNorm norm{nullptr};                // at the last stage
  torch::nn::Linear head{nullptr};      // at the last stage, unless tied

 private:
  void check_input(const at::Tensor& x, std::int64_t before) const;
  // Rotary turns of `length` tokens behind `before`, where `rows` lie.
  at::Tensor turns_of(const at::Tensor& rows, std::int64_t before, std::int64_t length);
  at::Tensor run(const at::Tensor& input, const AttentionContext& context);

  TransformerOptions options_;
  StagePart part_;
  std::vector<Block> blocks_;
  Rotary rotary_;
  at::Tensor tied_head_;
};
TORCH_MODULE(TransformerStage);

}  // namespace penstock::models
