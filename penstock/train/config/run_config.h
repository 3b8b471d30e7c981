// The configuration that a run folder holds, and what may change when the run continues.
//
//   const ResolvedConfig own = load_run_config("runs/first");                                        // what it was trained with
//   const ResolvedConfig longer = continue_run_config("runs/first", {.arguments = {"--steps", "500"}});
//
// runs/first/config.toml is complete, and says nothing about where the folder is: a moved or copied run reads and continues its own
// copy. A path inside of the run is written as {run}/..., every other one absolute, as it was when the run began, so that a run can be
// continued from any working folder. Files of earlier versions, which name their folder, are understood: the place that the file is
// read from counts.
//
// Reads only. Knows nothing of Torch.
#pragma once

#include <filesystem>
#include <string>

#include "penstock/train_config.h"

namespace penstock::train {

inline constexpr const char* kRunConfigName = "config.toml";

// Whether the folder has been a run: it has a config.toml.
bool holds_run(const std::filesystem::path& folder);

// Throws ConfigError for a folder without config.toml, and for a file that cannot be read.
ResolvedConfig load_run_config(const std::filesystem::path& folder);

// The run's own configuration with what is given now laid over it. What the run's parameters, its data or the order of its samples depend
// on cannot change: ConfigError names each such key with both values and the remedy. What was derived for the former layout
// (ranks, stages, schedule, accumulation) is derived anew when the layout changes.
ResolvedConfig continue_run_config(const std::filesystem::path& folder, const ConfigSources& sources);

// The folder that the sources name (output.run_folder); empty: none.
std::filesystem::path named_run_folder(const ConfigSources& sources);

// With {run} replaced by `folder`, and relative paths taken from the working folder. An empty `folder` leaves {run} for later.
ResolvedConfig with_absolute_paths(ResolvedConfig resolved, const std::filesystem::path& folder);

// The text of config.toml for a run in `folder`, whose configuration has absolute paths.
std::string run_config_text(const ResolvedConfig& resolved, const std::filesystem::path& folder);

// A file that to_toml wrote, with the origins that its comments tell.
ResolvedConfig read_written_config(const std::filesystem::path& file);

}  // namespace penstock::train
