// The parts of the model on this rank: built, split over tensor-parallel ranks, initialized, and wrapped as
// stages of a pipeline.
//
//   ModelStages stages(layout, config, device);
//   stages.stages()                   // for PipelineRuntime
//   stages.parameters()  // for the optimizer and checkpoints: by full model name, each tensor once
//
// Initial values are the same in every layout. If a shared parameter has copies on several ranks, all are
// listed under the same name; of several uses on one rank only the first one is listed.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/optimizer.h"
#include "penstock/schedule.h"
#include "penstock/shared_parameters.h"
#include "penstock/stage.h"
#include "penstock/train/job/layout.h"
#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

// Returns the configured schedule: generated from its kind, or read from a CSV file. Throws ConfigError for a
// file that cannot be read or does not match pp, virtual_stages and microbatches.
schedule::Schedule configured_schedule(const LayoutConfig& config);

// Returns the blocks of every stage.
std::vector<models::StagePart> configured_parts(const TrainConfig& config, const models::ModelPlan& plan,
                                                int stages);

// Throws ConfigError if ModelStages cannot be built on some rank.
void check_stages(const TrainConfig& config, const models::TrainableModel& model,
                  const schedule::Schedule& schedule);

class ModelStages {
 public:
  // [collective over the tensor-parallel ranks and over the pipeline] Throws ConfigError for incompatible
  // options.
  ModelStages(const RankLayout& layout, const TrainConfig& config, const schedule::Schedule& schedule,
              at::Device device);

  const models::TrainableModel& model() const { return *model_; }
  const models::ModelPlan& plan() const { return model_->plan(); }
  const std::vector<models::StagePart>& parts() const { return parts_; }  // of all stages
  std::vector<PipelineStage> stages() const { return stages_; }           // of this rank
  const std::vector<optim::NamedParameter>& parameters() const { return parameters_; }
  // Parameters of one stage of this rank.
  std::vector<optim::NamedParameter> parameters_of(int stage) const;

  // Tied weights and tables that several stages have, of all stages.
  const SharedParameters& shared() const { return *shared_; }
  SharedParameters& shared() { return *shared_; }

  // Buffers of this rank's stages that belong to the state of the model.
  std::vector<models::StateBuffer> state_buffers() const;
  // [collective over the data-parallel ranks] Ends a step on all stages.
  void after_step(const models::FinishedStep& step);

  // Returns the loss of a microbatch, divided by `tokens`. On the rank of the last stage.
  at::Tensor loss(const at::Tensor& output, const at::Tensor& targets, double tokens) const;

  // Switches between training and evaluation mode (dropout).
  void set_training(bool training);

 private:
  std::vector<ParameterUse> uses_of_shared(bool sharded);

  std::shared_ptr<models::TrainableModel> model_;
  std::vector<models::StagePart> parts_;
  std::vector<std::shared_ptr<models::ModelStage>> modules_;
  std::vector<PipelineStage> stages_;
  std::vector<optim::NamedParameter> parameters_;
  std::optional<SharedParameters> shared_;
};

}  // namespace penstock::train
