// One training run on one rank: model, pipeline, optimizer and data in the configured layout, step by step. The loop around it, with
// checkpoints, reports and signals, is Trainer.
//
//   TrainingJob job(world, config, data);
//   while (job.steps_done() < config.training.steps) {
//     const StepOutcome outcome = job.train_step();        // the same on every rank
//   }
//
// What a step computes does not depend on the layout: the loss is the sum over all tokens of the global batch divided by the number of
// its positions (targets that are ignored add nothing), whatever the division into microbatches, runs and replicas; initial values,
// dropout and data are functions of seed and position. Pipeline layouts give the same bits; sums over replicas and tensor-parallel ranks
// differ in rounding.
//
// Errors end the run on all ranks. Thread rule: one thread; [collective] over the world where not said otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint.h"
#include "penstock/world.h"
#include "penstock/optim/update/parameters.h"
#include "penstock/pipeline.h"
#include "penstock/train_config.h"
#include "penstock/train/job/held_memory.h"
#include "penstock/train/job/layout.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/report/step_outcome.h"

namespace penstock::train {

// What is trained on and what is validated on. Validation may be absent.
struct TrainingData {
  std::shared_ptr<const Sampler> training;
  std::shared_ptr<const Sampler> validation;
};

// What happens when the data are not those that the checkpoint was trained on.
enum class OtherData { FromTheStart, Refuse };

class TrainingJob {
 public:
  // Throws ConfigError for a layout that the world, the model or the data do not fit.
  TrainingJob(const comm::World& world, const TrainConfig& config, TrainingData data);
  ~TrainingJob();

  // `stop`: this rank wants the run to end; the outcome tells all of them alike.
  // Throws NotFiniteError when loss or gradients are not finite (fp16 skips such steps instead): the same on every rank, with the step, the
  // microbatch and the first bad tensor; parameters and optimizer are as before the step.
  StepOutcome train_step(bool stop = false);
  // Called in every step when .grad() is that of the whole batch (sums over replicas and uses are done, the loss scale is divided out) and
  // before it is clipped and used; not in a step that fp16 skips. It may change gradients. Set it on all ranks or on none.
  using GradientHook = std::function<void(const std::vector<optim::NamedParameter>& parameters)>;
  void set_gradient_hook(GradientHook hook);
  // Mean loss over the first `validate_batches` global batches of the validation data; they are the same every time.
  double validate();

  std::int64_t steps_done() const;
  std::uint64_t position() const;  // global samples consumed
  std::int64_t tokens_per_step() const;

  // For CheckpointWriter::save; tensors are not copied.
  checkpoint::CheckpointContents contents() const;
  // Parameters, optimizer, scheduler, loss scale, random and data position, from any layout. Other data are trained on from their first sample,
  // with a warning, or refused (ConfigError).
  void load(const checkpoint::Checkpoint& checkpoint, OtherData other_data = OtherData::FromTheStart);

  // What this rank holds now. No communication.
  HeldMemory held_memory() const;

  const RankLayout& layout() const;
  const ModelStages& model() const;
  PipelineRuntime& pipeline();
  at::Device device() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The device that a configuration means on this rank: "auto" is CUDA where every local rank has one of its own, else the CPU.
at::Device configured_device(const LayoutConfig& config, const comm::World& world);

}  // namespace penstock::train
