// Loads a whole trained model from a run folder, for generation and inspection.
#pragma once

#include <filesystem>
#include <memory>

#include "penstock/train_config.h"
#include "penstock/trainable_model.h"

namespace penstock::train {

struct LoadedModel {
  std::shared_ptr<models::ModelStage> model;
  TrainConfig config;
  std::filesystem::path checkpoint;
  std::int64_t step = 0;
};

// `path`: a run folder, whose newest valid checkpoint is loaded, or a checkpoint in a run folder, with
// config.toml two levels above. Any layout may have written it. The model is in evaluation mode. Throws
// ConfigError for any other folder, CheckpointError for damaged files.
LoadedModel load_model(const std::filesystem::path& path, at::Device device);

}  // namespace penstock::train
