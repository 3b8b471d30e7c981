// What `penstock train` and `penstock resume` share: a planned run is trained, on ranks that are started for it or on those of another launcher.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "penstock/train/job/run_folder.h"

namespace penstock::cli {

inline constexpr int kNotSaved = 3;  // exit code: the last checkpoint could not be written

struct TrainFlags {
  bool dry_run = false;
  int restarts = 0;
  std::string worker;  // run folder: this process is one of the ranks
  std::string handed;  // where it finds what the ranks are told
};

void add_train_flags(CLI::App& command, TrainFlags& flags);

// `sources` are what `plan` is made from. Returns the exit code.
int train_run(const CLI::App& command, const TrainFlags& flags, const train::ConfigSources& sources, const std::function<train::RunPlan()>& plan);

}  // namespace penstock::cli
