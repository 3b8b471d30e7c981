// The folder of a run: its location, its lock, and what is written when a start is accepted.
//
//   runs/tiny-20270131-093005/
//     config.toml        the resolved configuration, with comments (run_config.h)
//     data/              token shards, unless data.shards is set
//     checkpoints/       docs/checkpoints.md
//     metrics.jsonl      docs/metrics.md
//     traces/            of the configured steps (output.trace_steps)
//     report.html
//
// A start has these phases, and nothing in the folder changes before the last one:
//
//   const RunPlan plan = plan_run(sources);         // only reads; throws for keys that cannot change
//   RunFolder folder(plan);                         // locks; throws if the folder is in use
//   ... the ranks build the model and load the checkpoint; any of them may throw ...
//   write_run_config(folder.path(), resolved);      // accepted
#pragma once

#include <filesystem>
#include <memory>

#include "penstock/train_config.h"
#include "penstock/world.h"

namespace penstock::train {

struct RunPlan {
  ResolvedConfig resolved;       // with absolute paths; {run} stays if the folder has no name yet
  std::filesystem::path folder;  // empty: a new folder under runs/
  bool continues = false;        // the folder already contains a run
};

// For `penstock train`: continues the run in output.run_folder if there is one, else starts a new run. Throws
// ConfigError.
RunPlan plan_run(const ConfigSources& sources);
// For `penstock resume`: the folder must contain a run.
RunPlan plan_resume(const std::filesystem::path& folder, const ConfigSources& sources);

// Creates the folder if needed and locks it: only one process at a time trains in a folder.
//
// The lock is on the folder itself (flock), so that locking changes nothing in it, and the system releases it
// when the process ends in any way. It is held by the process that starts the ranks, or by rank 0 under
// another launcher. NFS cannot lock folders: there, a file .lock in the folder is locked, which works between
// hosts if the mount supports locks (NFS 4, or 3 with lockd; not with nolock or local_lock). On a file system
// without locks, a warning is logged.
class RunFolder {
 public:
  // Throws ConfigError if the folder cannot be created or another process trains in it.
  explicit RunFolder(const RunPlan& plan);
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  ~RunFolder();  // removes the folders that it created if they are empty

  const std::filesystem::path& path() const { return path_; }

 private:
  void lock();

  std::filesystem::path path_;  // absolute
  std::filesystem::path made_;  // the topmost folder that was created; empty: none
  int file_ = -1;
};

// [collective] Rank 0 creates and locks the folder (`held`); all ranks receive its path. Throws ConfigError
// on all ranks.
std::filesystem::path agree_on_run_folder(const comm::World& world, const RunPlan& plan,
                                          std::unique_ptr<RunFolder>& held);

// Accepts the start: writes config.toml unless it is unchanged, and keeps a former one as
// config-before-<time>.toml. A complete config.toml exists at every moment. Throws ConfigError.
void write_run_config(const std::filesystem::path& folder, const ResolvedConfig& resolved);

// Returns the checkpoint folder of a run.
std::filesystem::path checkpoint_folder(const TrainConfig& config, const std::filesystem::path& run_folder);

// Sets checkpoint.resume to "auto" if the run has its own checkpoints, so that it continues from the newest
// one.
TrainConfig continuing_config(TrainConfig config, const std::filesystem::path& run_folder);

}  // namespace penstock::train
