// What a model owes the trainer. Transformer and hybrid model implement it; a program can register its own
// (train::register_model, trainer.h) and train it with the same schedules, layouts, checkpoints and reports:
// examples/own_model.cpp.
//
//   models::TransformerStage transformer(models::TransformerOptions{.vocabulary = 256, .layers = 4});
//   models::ModelStage& stage = *transformer;
//   stage.set_initial_values(42);
//   at::Tensor logits = stage.forward_with(tokens, Tree());
//   stage.loss(logits, targets, double(targets.numel())).backward();
//
// Parameters must have the same names and initial values in every layout: a stage registers its modules under
// the names that ModelPlan lists, and computes initial values from seed and name (random.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/group.h"
#include "penstock/model_plan.h"
#include "penstock/pytree.h"
#include "penstock/recompute_plan.h"
#include "penstock/world.h"

namespace penstock::models {

// What a stage keeps of the tokens that it has seen, so that generation computes only new ones.
class StageCache {
 public:
  virtual ~StageCache() = default;
  // Returns the number of tokens seen so far.
  virtual std::int64_t length() const = 0;
};

// A buffer that belongs to the state of a model.
struct StateBuffer {
  std::string name;   // in the whole model; no parameter has it
  at::Tensor tensor;  // changed in place when a checkpoint is loaded
};

// The value of an auxiliary loss at one stage.
struct AuxiliaryLoss {
  std::string name;  // "balance"
  // A scalar without gradient: the part of the loss that this stage contributes. The sum over the stages is
  // the loss of the model, for example the mean over all blocks that have it.
  at::Tensor value;
  double weight = 0;  // by which it is multiplied
};

// A step of the trainer that has ended.
struct FinishedStep {
  bool updated = true;  // whether the optimizer changed the parameters; false: skipped, fp16 overflowed
  // The ranks that train this stage on other data, this one included; nothing: it is alone.
  std::optional<comm::Group> data_parallel = {};
};

// A part of a model: a module with the parameters of one stage of a pipeline. A whole model is one stage.
class ModelStage : public torch::nn::Module {
 public:
  // Returns the part of the model that this stage is.
  virtual const StagePart& part() const = 0;
  // Returns whether this stage is the whole model.
  bool is_whole() const { return part().has_embed() && part().has_head(); }
  // Returns the length of the longest sequence.
  virtual std::int64_t context() const = 0;

  // Computes hidden states, at the last stage the output for loss(), of a microbatch. `x`: tokens [batch,
  // length] at the first stage, hidden states at the others; `keywords`: those of TrainableModel::inputs().
  // With layout.shard > 1 the stage and its blocks() gather their parameters by a ForwardScope
  // (fully_shard.h).
  virtual at::Tensor forward_with(at::Tensor x, const Tree& keywords) = 0;

  // Returns the loss of a microbatch at the last stage, a scalar: a sum over its targets divided by `tokens`.
  // The default is token_loss() of logits and targets.
  virtual at::Tensor loss(const at::Tensor& output, const at::Tensor& targets, double tokens);

  // Returns the auxiliary losses of the training forwards of pipelines since the last call, each summed over
  // these forwards, and forgets them. Evaluations, trial runs and recomputations do not count. Must not wait
  // for the device. Names must be among ModelPlan::auxiliary. The default has none.
  virtual std::vector<AuxiliaryLoss> take_auxiliary_losses() { return {}; }

  // Returns what a forward leaves in the stage besides its result and what it writes into buffers, for
  // forwards that run as a captured graph (training.compile): called after the forward was captured, in its
  // scope. The tensors become results of the graph. The default leaves nothing.
  virtual Tree values_left_by_forward() { return {}; }
  // Called after each run of such a graph with its values, in the place of the forward. The default does
  // nothing.
  virtual void set_values_left_by_forward(const Tree& values);

  // Returns the buffers that checkpoints hold besides the parameters. They must be equal on all data-parallel
  // and tensor-parallel ranks. The default has none.
  virtual std::vector<StateBuffer> state_buffers() const { return {}; }

  // [collective over the data-parallel ranks] Ends a step: called by the trainer after the forwards and
  // backwards of all its microbatches and after the update. The default does nothing.
  virtual void after_step(const FinishedStep& step);

  // Fills the parameters. A value must be a function of seed, parameter name and element alone.
  virtual void set_initial_values(std::uint64_t seed) = 0;

  // Returns the units that fully_shard gathers one at a time. The default has none: the stage is one unit.
  virtual std::vector<std::shared_ptr<torch::nn::Module>> blocks() const { return {}; }

  // [collective over the mesh] Splits the parameters over ranks. The mesh has an axis "tp", tensor-parallel
  // ranks that split each layer, an axis "ep", data-parallel ranks that divide the experts, or both, in the
  // order (ep, tp). Parameters on a mesh with the axis "ep" have gradients that contain the terms of the
  // tokens of all ranks along it. The default throws NotImplemented; see check_tensor_parallel() and
  // check_expert_parallel() of TrainableModel.
  virtual void parallelize(const comm::MeshGroups& mesh);

  // Divides the tokens of hidden states over the tensor-parallel ranks wherever layers are not split: norms,
  // dropout and sums of residuals compute the tokens of their rank, and hidden states between stages are
  // those tokens, [batch, length / ranks, width]. Tokens, keywords and the output for loss() stay those of
  // whole rows. Called before parallelize(), whose mesh has the axis "tp". The default throws NotImplemented;
  // see check_sequence_parallel() of TrainableModel.
  virtual void set_sequence_parallel();

  // Called once with the data-parallel ranks, which have other rows of the same microbatches, before the
  // first forward in training mode. For losses that are not sums over rows. The default does nothing.
  virtual void set_replicas(const comm::Group& replicas);

  // Chooses the blocks whose activations are recomputed in the backward (recompute.h). Gradients must not
  // change. The default throws NotImplemented if any is chosen; see check_recompute() of TrainableModel.
  virtual void set_recompute(const RecomputePlan& plan);

  // Makes the last use of a tied parameter (ModelPlan::tied) of a whole model an autograd leaf of its own
  // that shares memory with the first one, registered as a parameter, and returns it. Gradients are then
  // summed in the same order in every layout. The default returns an undefined tensor: autograd adds both.
  virtual at::Tensor separate_last_use(const std::string& tied);

  // Returns a cache for `capacity` tokens, or null if the model has none: generation then computes all tokens
  // again for each new one. The default returns null.
  virtual std::unique_ptr<StageCache> make_cache(std::int64_t capacity) const;
  // Computes tokens that follow those in the cache, and adds them to it. Records no graph. `cache` is from
  // make_cache() of this stage. The default throws NotImplemented.
  virtual at::Tensor forward_cached(const at::Tensor& x, StageCache& cache);
  // The same with keyword arguments of the new tokens, as in forward_with(). The default accepts none: it
  // calls forward_cached() without keywords, and throws NotImplemented otherwise.
  virtual at::Tensor forward_cached_with(const at::Tensor& x, StageCache& cache, const Tree& keywords);
};

// Text as tensors [batch, length], Long, and what is known about it.
struct TokenBatch {
  at::Tensor tokens = {};     // what the model reads
  at::Tensor targets = {};    // the token after each one; kIgnoredTarget (language_model.h) does not count
  at::Tensor documents = {};  // the document of each token; undefined: attention is not masked
  // What else is known about the tokens, for models that use it: a dict of keyword arguments for every stage,
  // or None. Dim 0 of its tensors is the batch. Penstock's data sets have the structure of C++ text, if
  // data.structure is cpp.
  Tree metadata = {};
};

// A batch as a pipeline takes it; dim 0 of every tensor is split into microbatches.
struct StageInputs {
  Tree args;      // a tuple with the input of the first stage
  Tree keywords;  // given to every stage
  Tree target;    // given to the loss
};

// Makes a stage with uninitialized parameters.
using MakeStage = std::function<std::shared_ptr<ModelStage>(const StagePart& part)>;

// Returns a plan whose parameters are those of the stages that `make_stage` makes, one for each of the
// `blocks` of this kind, without allocating their memory. `sizes` has vocabulary, width and context. Costs
// are estimated: two operations per token for each element of a matrix.
ModelPlan plan_from_stages(ModelPlan sizes, std::int64_t blocks, const std::string& kind,
                           const MakeStage& make_stage);

// A model as a whole: what is known of it, and how to make its stages.
class TrainableModel {
 public:
  virtual ~TrainableModel() = default;

  // Returns blocks, parameters and costs.
  virtual const ModelPlan& plan() const = 0;
  // Creates a stage with uninitialized parameters. Called for each stage of a rank, or once for a whole
  // model.
  virtual std::shared_ptr<ModelStage> make_stage(const StagePart& part) const = 0;
  // Throws ConfigError if parallelize() cannot split the model over this many ranks. The default accepts 1
  // only.
  virtual void check_tensor_parallel(int ranks) const;
  // Throws ConfigError if the stages cannot divide hidden states over tensor-parallel ranks
  // (ModelStage::set_sequence_parallel). The default always throws.
  virtual void check_sequence_parallel() const;
  // Throws ConfigError if parallelize() cannot divide experts over this many data-parallel ranks. The default
  // accepts 1 only.
  virtual void check_expert_parallel(int ranks) const;
  // Throws ConfigError if set_recompute() of a stage would not accept the plan. The default accepts one that
  // chooses nothing.
  virtual void check_recompute(const RecomputePlan& plan) const;
  // Returns the inputs of the stages for a batch. The default passes tokens, targets and, if there are any,
  // documents under the keyword "documents", and metadata under its own keywords. Documents of the batch
  // replace those of the metadata.
  virtual StageInputs inputs(const TokenBatch& batch) const;
  // Returns text that names everything that decides what the stages compute besides the configuration and the
  // program: options of the model that the configuration does not have. Graphs of the stages are then kept
  // between runs (training.compile, docs/compile_cache.md): equal text promises equal computations. The
  // default returns std::nullopt: nothing is promised, and every start captures.
  virtual std::optional<std::string> identity() const { return std::nullopt; }
};

}  // namespace penstock::models
