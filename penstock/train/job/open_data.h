// Opens the data of a configuration, and makes token shards first if necessary.
#pragma once

#include <filesystem>

#include "penstock/train/job/job.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace penstock::train {

// [collective] Opens existing shards or token files; otherwise rank 0 makes shards from the sources in
// `folder`/data while the other ranks wait. Throws ConfigError on all ranks.
TrainingData open_data(const comm::World& world, const TrainConfig& config,
                       const std::filesystem::path& folder);

}  // namespace penstock::train
