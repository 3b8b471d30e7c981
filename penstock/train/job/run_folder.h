// The folder of a run: where it is, who may write to it, and what is put there when a start is accepted.
//
//   runs/tiny-20270131-093005/
//     config.toml        everything resolved, with comments (run_config.h)
//     data/              token shards, unless the configuration names some
//     checkpoints/       docs/checkpoints.md
//     metrics.jsonl      docs/metrics.md
//     traces/            of the steps that the configuration names
//     report.html
//
// A start goes through these steps, and nothing in the folder changes before the last of them:
//
//   const RunPlan plan = plan_run(sources);         // reads; refuses what cannot change
//   RunFolder folder(plan);                         // locks; refuses a folder that is in use
//   ... the ranks build the model and load the checkpoint; any of them may refuse ...
//   write_run_config(folder.path(), resolved);      // accepted
#pragma once

#include <filesystem>
#include <memory>

#include "penstock/world.h"
#include "penstock/train_config.h"

namespace penstock::train {

struct RunPlan {
  ResolvedConfig resolved;       // with absolute paths; {run} is left in those of a folder that has no name yet
  std::filesystem::path folder;  // empty: a new one under runs/
  bool continues = false;        // it holds a run already
};

// For `penstock train`: continues the run of output.run_folder if there is one, else a new run. Throws ConfigError.
RunPlan plan_run(const ConfigSources& sources);
// For `penstock resume`: the folder must hold a run.
RunPlan plan_resume(const std::filesystem::path& folder, const ConfigSources& sources);

// The folder, made if need be, and its lock: one process at a time trains in a folder.
//
// The lock is the folder's own (flock), so taking it changes nothing in it, and the system drops it when the process ends, however it ends. It
// belongs to the process that starts the ranks, or to rank 0 where another launcher does. NFS cannot lock folders: there a file .lock in it is
// locked instead, which works between hosts if the mount supports locks (NFS 4, or 3 with lockd; not with nolock or local_lock). A file system
// without any locks gives a warning.
class RunFolder {
 public:
  // Throws ConfigError for a folder that cannot be made, or that another process trains in.
  explicit RunFolder(const RunPlan& plan);
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  ~RunFolder();  // removes the folders that it made if nothing was put there

  const std::filesystem::path& path() const { return path_; }

 private:
  void lock();

  std::filesystem::path path_;   // absolute
  std::filesystem::path made_;   // the uppermost folder that did not exist before; empty: none
  int file_ = -1;
};

// [collective] Rank 0 makes and locks it (`held`), all get the same path. Throws ConfigError on all ranks.
std::filesystem::path agree_on_run_folder(const comm::World& world, const RunPlan& plan, std::unique_ptr<RunFolder>& held);

// The start is accepted: config.toml is written, unless it says the same already; a former one is kept as config-before-<time>.toml. At
// every moment there is a whole config.toml. Throws ConfigError.
void write_run_config(const std::filesystem::path& folder, const ResolvedConfig& resolved);

// Where the checkpoints of a run are.
std::filesystem::path checkpoint_folder(const TrainConfig& config, const std::filesystem::path& run_folder);

// checkpoint.resume says what a new run starts from. A run that has checkpoints of its own continues from the newest.
TrainConfig continuing_config(TrainConfig config, const std::filesystem::path& run_folder);

}  // namespace penstock::train
