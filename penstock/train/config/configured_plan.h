// The built-in model that a configuration describes, without tensors, and how it is divided into stages.
//
//   const models::ModelPlan plan = configured_plan(config.model);
//   auto parts = models::partition_model(plan, stages, configured_partition(config));
#pragma once

#include <string>

#include "penstock/hybrid_options.h"
#include "penstock/model_plan.h"
#include "penstock/train_config.h"
#include "penstock/transformer_options.h"

namespace penstock::train {

// Returns the options of the transformer that the configuration describes. Throws ConfigError.
models::TransformerOptions transformer_options(const ModelConfig& config);
// Returns those of the hybrid model. Throws ConfigError.
models::HybridOptions hybrid_options(const ModelConfig& config);

// Returns model.type, or what `auto` stands for. Throws ConfigError for a transformer with settings that it
// cannot have.
std::string configured_type(const ModelConfig& model);

// Returns blocks, parameters and costs of a built-in model. Throws ConfigError for inconsistent options, and
// for models that a program registers.
models::ModelPlan configured_plan(const ModelConfig& model);

// Returns layout.partition and the cuts of model.pattern.
models::PartitionOptions configured_partition(const TrainConfig& config);

}  // namespace penstock::train
