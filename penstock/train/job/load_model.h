// A trained model in one piece, from the folder of a run: for generating and inspecting.
#pragma once

#include <filesystem>
#include <optional>

#include "penstock/transformer.h"
#include "penstock/train_config.h"

namespace penstock::train {

struct LoadedModel {
  models::TransformerStage model;
  TrainConfig config;
  std::filesystem::path checkpoint;
  std::int64_t step = 0;
};

// `path`: the folder of a run (its newest sound checkpoint is taken), or one checkpoint in the folder of a run, with config.toml two
// levels above. The layout that wrote it does not matter. In evaluation mode. Throws ConfigError for a folder that is none of these,
// CheckpointError for damage.
LoadedModel load_model(const std::filesystem::path& path, at::Device device);

}  // namespace penstock::train
