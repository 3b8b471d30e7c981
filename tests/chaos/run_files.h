// The files of a small training: configuration, losses, checkpoints.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/chaos/judge.h"
#include "tests/chaos/plan.h"
#include "tests/train/folder_state.h"

namespace penstock::chaos {

// Writes the text that is trained on.
void write_text(const std::filesystem::path& folder);

struct RunFiles {
  std::filesystem::path text;
  std::filesystem::path run;
  std::filesystem::path checkpoints;
};

// The configuration of a trial. The learning rate is constant, so that a shorter run has the first losses of
// a longer one.
std::string configuration(const Plan& plan, const RunFiles& files, const std::string& transport = "auto");

struct RunProgress {
  Losses losses;            // of a step that ran twice, the later one
  int continued_after = 0;  // of the last start
  int last_step = 0;        // 0: none
};

// Reads metrics.jsonl; an incomplete last line and a missing file are no error.
RunProgress read_progress(const std::filesystem::path& run_folder);

// Complete checkpoints with what is in them, by name ("step-00000012").
using Checkpoints = std::map<std::string, test::FolderState>;
Checkpoints read_checkpoints(const std::filesystem::path& folder);
// Adds those that are new: a complete one is never changed.
void add_new_checkpoints(const std::filesystem::path& folder, Checkpoints& known);
int step_of(const std::string& checkpoint);

// Those of `before` that are gone or have changed.
std::vector<std::string> lost_checkpoints(const Checkpoints& before, const Checkpoints& after);

// Names of what an interrupted save left behind.
std::vector<std::string> unfinished_saves(const std::filesystem::path& folder);

// Damages a file of a checkpoint and returns its name.
std::string damage_checkpoint(const std::filesystem::path& checkpoint, Damage damage, std::uint64_t seed);

}  // namespace penstock::chaos
