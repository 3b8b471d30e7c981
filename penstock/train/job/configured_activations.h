// What the graphs of a configuration keep for their backward (training.activation_budget and
// training.activation_policy).
// Thread safety: any thread.
#pragma once

#include <string>

#include "penstock/compile_options.h"
#include "penstock/model_plan.h"
#include "penstock/train_config.h"

namespace penstock::train {

// For the graph of a stage.
graph::ActivationOptions configured_activations(const TrainConfig& config);

// For the graph of the whole model, which no rank of a pipeline runs. A budget in bytes is for the graph of
// each stage: here it is that of all stages of one copy of the model together.
struct ModelActivations {
  graph::ActivationOptions options;
  std::string note;  // says so: "... 1.0 GiB for each of 4 stages, 4.0 GiB for the whole model"; or empty
};
ModelActivations activations_of_whole_model(const TrainConfig& config);

// Throws ConfigError for a pattern that matches no module of the model, with the nearest one.
void check_activation_policy(const TrainConfig& config, const models::ModelPlan& plan);

}  // namespace penstock::train
