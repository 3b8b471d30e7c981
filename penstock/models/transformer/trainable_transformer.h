// The transformer as a model that the trainer can train.
#pragma once

#include <memory>

#include "penstock/trainable_model.h"
#include "penstock/transformer_options.h"

namespace penstock::models {

// Throws ConfigError for inconsistent options.
std::shared_ptr<TrainableModel> trainable_transformer(const TransformerOptions& options);

}  // namespace penstock::models
