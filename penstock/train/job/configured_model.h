// The model that a configuration describes.
//
//   const std::shared_ptr<models::TrainableModel> model = configured_model(config);
//   model->plan()                     // blocks, parameters and costs, without tensors
//
// model.type names it: a built-in one, or one that the program registered (register_model, trainer.h).
#pragma once

#include <memory>

#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

// Throws ConfigError for an unknown type, with the names that are known, and for inconsistent options.
std::shared_ptr<models::TrainableModel> configured_model(const TrainConfig& config);

}  // namespace penstock::train
