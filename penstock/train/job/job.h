// One training run on one rank: model, pipeline, optimizer and data in the configured layout, step by step.
// Trainer is the loop around it, with checkpoints, reports and signals.
//
//   TrainingJob job(world, config, data);
//   while (job.steps_done() < config.training.steps) {
//     const StepOutcome outcome = job.train_step();        // the same on every rank
//   }
//
// The result of a step does not depend on the layout: the loss is the sum over all tokens of the global batch
// divided by the number of positions (ignored targets add nothing), regardless of the division into
// microbatches, runs and replicas; initial values, dropout and data are functions of seed and position.
// Pipeline layouts produce the same bits; sums over replicas and tensor-parallel ranks differ in rounding.
//
// Errors end the run on all ranks. Thread safety: one thread. [collective] over the world unless stated
// otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/observer.h"
#include "penstock/optimizer.h"
#include "penstock/pipeline.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/job/held_memory.h"
#include "penstock/train/job/layout.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace penstock::train {

// Training and validation data. Validation may be null.
struct TrainingData {
  std::shared_ptr<const Sampler> training;
  std::shared_ptr<const Sampler> validation;
};

// What to do if the data are not those that the checkpoint was trained on.
enum class ChangedDataPolicy { FromTheStart, Refuse };

class TrainingJob {
 public:
  // Throws ConfigError for a layout that does not fit the world, the model or the data.
  TrainingJob(const comm::World& world, const TrainConfig& config, TrainingData data);
  ~TrainingJob();

  // `stop`: this rank requests the end of the run; the outcome reports it on all ranks.
  // Throws NotFiniteError if the loss or the gradients are not finite (fp16 skips such steps instead): the
  // same error on every rank, with the step, the microbatch and the first bad tensor. Parameters and
  // optimizer are then as before the step.
  StepOutcome train_step(bool stop = false);
  // Called in every step when .grad() is complete (sums over replicas and uses are done, the loss scale is
  // divided out) and before clipping and the update; not called in a step that fp16 skips. It may change
  // gradients. Set it on all ranks or on none.
  using GradientHook = std::function<void(const std::vector<optim::NamedParameter>& parameters)>;
  void set_gradient_hook(GradientHook hook);
  // Returns the mean loss over the first `validate_batches` global batches of the validation data, the same
  // batches every time.
  double validate();

  std::int64_t steps_done() const;
  std::uint64_t position() const;  // global samples consumed
  std::int64_t tokens_per_step() const;

  // For CheckpointWriter::save; tensors are not copied.
  checkpoint::CheckpointContents contents() const;
  // Loads parameters, optimizer, scheduler, loss scale, random state and data position from a checkpoint of
  // any layout. Different data are either trained on from their first sample, with a warning, or refused
  // (ConfigError).
  void load(const checkpoint::Checkpoint& checkpoint,
            ChangedDataPolicy other_data = ChangedDataPolicy::FromTheStart);

  // Memory held by this rank now. No communication.
  HeldMemory held_memory() const;

  const RankLayout& layout() const;
  const ModelStages& model() const;
  PipelineRuntime& pipeline();
  at::Device device() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns the configured device of this rank: "auto" is CUDA if every local rank has its own GPU, else the
// CPU.
at::Device configured_device(const LayoutConfig& config, const comm::World& world);

}  // namespace penstock::train
