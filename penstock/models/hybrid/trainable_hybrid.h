// The hybrid model as a model that the trainer can train.
#pragma once

#include <memory>

#include "penstock/hybrid_options.h"
#include "penstock/trainable_model.h"

namespace penstock::models {

// `auxiliary_scale`: see HybridStageImpl::set_auxiliary_scale. Throws ConfigError for inconsistent options.
std::shared_ptr<TrainableModel> trainable_hybrid(const HybridOptions& options, double auxiliary_scale = 1);

}  // namespace penstock::models
