// What the graphs of a configuration keep for their backward (training.activation_budget and
// training.activation_policy).
// Thread safety: any thread.
#pragma once

#include "penstock/compile_options.h"
#include "penstock/model_plan.h"
#include "penstock/train_config.h"

namespace penstock::train {

// For the graph of a stage, or of the whole model.
graph::ActivationOptions configured_activations(const TrainConfig& config);

// Throws ConfigError for a pattern that matches no module of the model, with the nearest one.
void check_activation_policy(const TrainConfig& config, const models::ModelPlan& plan);

}  // namespace penstock::train
