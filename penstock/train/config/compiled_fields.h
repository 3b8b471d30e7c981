// The settings that decide what the captured graphs of the stages compute, for the compile cache and for
// artifacts (docs/compile_cache.md).
//
//   for (const auto& [name, value] : compiled_fields(config)) ...   // "model.width", "192"
//
// Two configurations with equal fields have equal graphs in all stages, except for what the manifest of an
// artifact and the key of a cache entry hold besides: program, LibTorch, device. Steps, learning rates,
// seeds, data and folders are not among them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "penstock/train_config.h"

namespace penstock::train {

std::vector<std::pair<std::string, std::string>> compiled_fields(const TrainConfig& config);

}  // namespace penstock::train
