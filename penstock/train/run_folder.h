// The folder of a run: where it is, and what `penstock train` puts there before the first step.
//
//   runs/tiny-20270131-093005/
//     config.toml        everything resolved, with comments
//     data/              token shards, unless the configuration names some
//     checkpoints/       docs/checkpoints.md
//     metrics.jsonl      docs/metrics.md
//     traces/            of the steps that the configuration names
//     report.html
#pragma once

#include <filesystem>

#include "penstock/comm/world.h"
#include "penstock/train/config.h"

namespace penstock::train {

// Makes it and writes config.toml: output.run_folder, else a new one under runs/. A folder that has been a run before is used again, to be
// continued; its former config.toml is kept beside the new one if they differ. Throws ConfigError.
std::filesystem::path make_run_folder(const ResolvedConfig& resolved);

// [collective] Rank 0 makes it, all get the same path.
std::filesystem::path agree_on_run_folder(const comm::World& world, const ResolvedConfig& resolved);

}  // namespace penstock::train
