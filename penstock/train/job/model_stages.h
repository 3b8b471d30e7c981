// The parts of the model on this rank: built, split over tensor-parallel ranks, initialized, and wrapped as
// stages of a pipeline.
//
//   ModelStages stages(layout, config, device);
//   stages.stages()                   // for PipelineRuntime
//   stages.parameters()  // for the optimizer and checkpoints: by full model name, each tensor once
//
// Initial values are the same in every layout. If a tied weight has copies on two ranks, both are listed
// under the same name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "penstock/optimizer.h"
#include "penstock/schedule.h"
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
  // [collective over the tensor-parallel ranks] Throws ConfigError for incompatible options.
  ModelStages(const RankLayout& layout, const TrainConfig& config, const schedule::Schedule& schedule,
              at::Device device);

  const models::TrainableModel& model() const { return *model_; }
  const models::ModelPlan& plan() const { return model_->plan(); }
  const std::vector<models::StagePart>& parts() const { return parts_; }  // of all stages
  std::vector<PipelineStage> stages() const { return stages_; }           // of this rank
  std::vector<models::StagePart> own_parts() const;                       // of its stages
  const std::vector<optim::NamedParameter>& parameters() const { return parameters_; }
  // Parameters of one stage of this rank.
  std::vector<optim::NamedParameter> parameters_of(int stage) const;

  // The uses of a tied weight that are on this rank. If both are here, they are two autograd leaves, and
  // parameters() has the first: they share memory, or, with sharded stages, each has its own shard.
  struct TiedWeight {
    at::Tensor embed, head;
    int peer = -1;  // pipeline rank that has the other use, if this rank does not
  };
  const TiedWeight& tied() const { return tied_; }
  bool is_tied(const at::Tensor& parameter) const;
  // For norms: returns whether a parameter counts. Of copies on two ranks only one counts.
  bool counts(const optim::NamedParameter& parameter) const;

  // Copies new values of the first leaf to the second, if the second has its own memory. No communication.
  void share_tied();

  // Buffers of this rank's stages that belong to the state of the model.
  std::vector<models::StateBuffer> state_buffers() const;
  // [collective over the data-parallel ranks] Ends a step on all stages.
  void after_step(const models::FinishedStep& step);

  // Returns the loss of a microbatch, divided by `tokens`. On the rank of the last stage.
  at::Tensor loss(const at::Tensor& output, const at::Tensor& targets, double tokens) const;

  // Switches between training and evaluation mode (dropout).
  void set_training(bool training);

 private:
  void tie(const RankLayout& layout, const schedule::StageMap& map);
  bool is_second_leaf(const at::Tensor& parameter) const;

  std::shared_ptr<models::TrainableModel> model_;
  std::vector<models::StagePart> parts_;
  std::vector<std::shared_ptr<models::ModelStage>> modules_;
  std::vector<PipelineStage> stages_;
  std::vector<optim::NamedParameter> parameters_;
  TiedWeight tied_;
};

}  // namespace penstock::train
