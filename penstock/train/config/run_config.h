// The configuration in a run folder, and what may change when the run continues.
//
//   const ResolvedConfig own = load_run_config("runs/first");                     // what it was trained with
//   const ResolvedConfig longer = continue_run_config("runs/first", {.arguments = {"--steps", "500"}});
//
// runs/first/config.toml is complete and does not contain the location of the folder: a moved or copied run
// reads and continues its own copy. A path inside the run is written as {run}/..., every other path is
// absolute, so that the run can be continued from any working folder. Files of earlier versions, which
// contain their folder, are accepted: the folder that the file is read from is used.
//
// Only reads. Does not depend on Torch.
#pragma once

#include <filesystem>
#include <string>

#include "penstock/train_config.h"

namespace penstock::train {

inline constexpr const char* kRunConfigName = "config.toml";

// Returns whether the folder contains a run: it has a config.toml.
bool contains_run(const std::filesystem::path& folder);

// Throws ConfigError for a folder without config.toml and for a file that cannot be read.
ResolvedConfig load_run_config(const std::filesystem::path& folder);

// Applies the given sources on top of the run's own configuration. Keys that the parameters, the data or the
// order of samples depend on cannot change: ConfigError names each such key with both values and the remedy.
// Values derived for the former layout (ranks, stages, schedule, accumulation) are derived again when the
// layout changes.
ResolvedConfig continue_run_config(const std::filesystem::path& folder, const ConfigSources& sources);

// Returns the folder that the sources name (output.run_folder); empty if none.
std::filesystem::path named_run_folder(const ConfigSources& sources);

// Replaces {run} by `folder` and makes relative paths absolute. If `folder` is empty, {run} stays.
ResolvedConfig with_absolute_paths(ResolvedConfig resolved, const std::filesystem::path& folder);

// Returns the text of config.toml for a run in `folder`, whose configuration has absolute paths.
std::string run_config_text(const ResolvedConfig& resolved, const std::filesystem::path& folder);

// Reads a file written by to_toml, with the origins in its comments.
ResolvedConfig read_written_config(const std::filesystem::path& file);

}  // namespace penstock::train
