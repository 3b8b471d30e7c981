// Shared by `penstock train` and `penstock resume`: trains a planned run on its own ranks or on those of
// another launcher.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "penstock/cli/common/node_flags.h"
#include "penstock/train/job/run_folder.h"

namespace penstock::cli {

inline constexpr int kNotSaved = 3;  // exit code: the last checkpoint could not be written

struct TrainFlags {
  bool dry_run = false;
  int restarts = 0;
  NodeFlags nodes;
  std::string worker;  // run folder: this process is one of the ranks
  std::string handed;  // folder with the files for the ranks
};

void add_train_flags(CLI::App& command, TrainFlags& flags);

// `plan` is made from `sources`. Returns the exit code.
int train_run(const CLI::App& command, const TrainFlags& flags, const train::ConfigSources& sources,
              const std::function<train::RunPlan()>& plan);

}  // namespace penstock::cli
