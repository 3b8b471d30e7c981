// The model that a configuration describes.
//
//   const std::shared_ptr<models::TrainableModel> model = configured_model(config);
//   model->plan()                     // blocks, parameters and costs, without tensors
//
// model.type names it: a built-in one, or one that the program registered (register_model, trainer.h).
#pragma once

#include <memory>

#include "penstock/recompute_plan.h"
#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

// Throws ConfigError for an unknown type, with the names that are known, and for inconsistent options.
std::shared_ptr<models::TrainableModel> configured_model(const TrainConfig& config);

// Returns what training.recompute and its stages and microbatches choose in the model. Throws ConfigError for
// what the model, a schedule of so many stages or the layout does not have.
models::RecomputePlan configured_recompute(const TrainConfig& config, const models::TrainableModel& model,
                                           int stages);

}  // namespace penstock::train
