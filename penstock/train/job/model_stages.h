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

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "penstock/compiled_stage.h"
#include "penstock/observer.h"
#include "penstock/optimizer.h"
#include "penstock/pytree.h"
#include "penstock/schedule.h"
#include "penstock/shared_parameters.h"
#include "penstock/stage.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/job/layout.h"
#include "penstock/train/job/stage_graphs.h"
#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

// Returns the blocks of every part of the model: parts_of_model() of the schedule (stage_copies.h).
std::vector<models::StagePart> configured_parts(const TrainConfig& config, const models::ModelPlan& plan,
                                                int parts);

// Throws ConfigError if ModelStages cannot be built on some rank.
void check_stages(const TrainConfig& config, const models::TrainableModel& model,
                  const schedule::Schedule& schedule);

// One stage of the model as ModelStages makes it, apart from the others: to compile it beforehand
// (write_artifact.h). With training.compile = graph or fused.
struct SingleStage {
  std::shared_ptr<models::ModelStage> module;
  std::optional<SharedParameters> shared;  // those that a whole model uses twice
  PipelineStage stage;
  // Captures, compiles and keeps the graph of a forward with these arguments (prepare_stage.h).
  std::function<void(const Tree& args, const Tree& keywords)> prepare;
};
SingleStage make_single_stage(const RankLayout& layout, const TrainConfig& config,
                              const schedule::Schedule& schedule, const models::TrainableModel& model,
                              int stage, at::Device device, const StageGraphs& graphs,
                              std::function<void(const StageCapture& capture)> captured);

class ModelStages {
 public:
  // [collective over the tensor-parallel ranks and over the pipeline] Throws ConfigError for incompatible
  // options. `graphs`: with training.compile, where the stages get theirs.
  ModelStages(const RankLayout& layout, const TrainConfig& config, const schedule::Schedule& schedule,
              at::Device device, const StageGraphs& graphs = {});

  const models::TrainableModel& model() const { return *model_; }
  const models::ModelPlan& plan() const { return model_->plan(); }
  const std::vector<models::StagePart>& parts() const { return parts_; }  // of the model
  std::vector<PipelineStage> stages() const { return stages_; }           // of this rank
  std::vector<models::StagePart> own_parts() const;                       // of its stages
  const std::vector<optim::NamedParameter>& parameters() const { return parameters_; }
  // Parameters of one stage of this rank.
  std::vector<optim::NamedParameter> parameters_of(int stage) const;

  // Tied weights and tables that several stages have, of all stages.
  const SharedParameters& shared() const { return *shared_; }
  SharedParameters& shared() { return *shared_; }
  // Whether a parameter belongs to the second copy of the model in a bidirectional schedule.
  bool is_second_copy(const optim::NamedParameter& parameter) const;
  // For norms: returns whether a parameter counts. Of copies on several ranks only one counts.
  bool counts(const optim::NamedParameter& parameter) const;

  // Buffers of this rank's stages that belong to the state of the model.
  std::vector<models::StateBuffer> state_buffers() const;
  // [collective over the ranks that train the same stages] Ends a step on all stages. `updated`: whether the
  // optimizer changed the parameters.
  void after_step(bool updated);
  // Returns for each auxiliary loss of the plan the sum over this rank's stages and the forwards since the
  // last call; undefined without any. Does not wait for the device. Throws StateError for a loss that the
  // plan does not have.
  std::vector<at::Tensor> take_auxiliary_losses();

  // Returns the loss of a microbatch, divided by `tokens`. On the rank of the last stage.
  at::Tensor loss(const at::Tensor& output, const at::Tensor& targets, double tokens) const;

  // Returns the graphs that this rank got since the last call (training.compile).
  std::vector<CompiledForward> take_compiled();

  // Switches between training and evaluation mode (dropout).
  void set_training(bool training);

 private:
  // Indices of the modules.
  std::vector<std::size_t> in_order_of_parts() const;

  std::shared_ptr<models::TrainableModel> model_;
  std::vector<models::StagePart> parts_;
  std::vector<int> indices_;                                  // of the stages of this rank
  std::vector<std::shared_ptr<models::ModelStage>> modules_;  // of the same stages
  std::shared_ptr<std::vector<CompiledForward>> compiled_ = std::make_shared<std::vector<CompiledForward>>();
  std::vector<PipelineStage> stages_;
  std::vector<optim::NamedParameter> parameters_;
  std::optional<SharedParameters> shared_;
  std::unordered_set<const c10::TensorImpl*> second_copies_;  // parameters
  std::map<int, comm::Group> trainers_;  // by stage: who trains it on other data; empty: nobody
};

}  // namespace penstock::train
