// Compiles the stages of a whole layout beforehand, in one process: the artifact for training.artifact.
//
//   write_artifact(config, "compiled", [](const ArtifactProgress& now) { ... });
//
// Stages are made one at a time, as their rank would make them, without other ranks; forward and backward of
// training and the forward of validation are captured on fake tensors and compiled. Nothing is computed, and
// no data is read. Memory: the parameters of the largest stage of a rank, unsharded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "penstock/train_config.h"

namespace penstock::train {

struct ArtifactProgress {
  std::string doing;       // "stage 2, tp rank 1: training"
  std::size_t done = 0;    // graphs
  std::size_t graphs = 0;  // of the whole artifact
};

struct WrittenArtifact {
  std::size_t stages = 0;  // of the pipeline
  std::size_t graphs = 0;
  std::size_t nodes = 0;  // operators, forward and backward, of all graphs
  std::uint64_t bytes = 0;
  double seconds = 0;
};

// Replaces an artifact that is in the folder. `progress` is called before each graph; it may be empty. Throws
// ConfigError for what training would refuse and for a folder that cannot be written, NotImplemented for
// graphs that cannot be stored. Until it returns, the folder cannot be opened as an artifact.
WrittenArtifact write_artifact(const TrainConfig& config, const std::filesystem::path& folder,
                               const std::function<void(const ArtifactProgress& now)>& progress = {});

}  // namespace penstock::train
