// The loop of a run: steps, validation, checkpoints, traces, and an orderly end.
//
//   Trainer trainer(world, config, folder, {&progress, &metrics});
//   trainer.run();
//
// Everything of a run is in its folder: config.toml (resolved), data/ (token shards), checkpoints/, metrics.jsonl, traces/, report.html.
// Making a trainer may be refused: sizes that do not fit the checkpoint, damage, other data. Until every rank has built its model and
// loaded the checkpoint nothing in the folder changes (TrainerOptions::accepted); token shards that were made for a start that is refused are removed.
//
// A checkpoint that cannot be written does not end the run as long as there is an older one (checkpoint.on_failure): the error is logged when it
// happens, and the next try follows with the next checkpoint and at the end. A run whose last checkpoint never got to the disk ends as
// RunEnd::NotSaved.
//
// SIGTERM, SIGINT (request_stop) and the time limit end the run after the step that all ranks then agree on, with a checkpoint. A run
// continues from its newest sound checkpoint, whichever layout wrote it, and reaches the losses that it would have reached.
// Thread rule: one thread. [collective] over the world.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "penstock/checkpoint/files/output_file.h"
#include "penstock/world.h"
#include "penstock/train_config.h"
#include "penstock/train/job/job.h"
#include "penstock/observer.h"

namespace penstock::train {

// The data of a configuration: shards that are there, else made from the sources into `folder`/data by rank 0 while the others wait.
// [collective] Throws ConfigError on all ranks.
TrainingData open_data(const comm::World& world, const TrainConfig& config, const std::filesystem::path& folder);

// Ends the runs of this process after their current step. Safe in a signal handler.
void request_stop() noexcept;
bool stop_requested() noexcept;

struct TrainerOptions {
  // Called on rank 0 when the start is accepted by all ranks, before anything in the folder changes. What it throws refuses the start on all ranks.
  std::function<void()> accepted;
  checkpoint::WriteFault write_fault;  // for tests of full disks
};

class Trainer {
 public:
  // Observers are used on rank 0; they must outlive the trainer.
  Trainer(const comm::World& world, const TrainConfig& config, std::filesystem::path folder, std::vector<Observer*> observers = {}, TrainerOptions options = {});
  ~Trainer();

  // To the last step, or to an earlier end that was asked for. The same on every rank where it is NotSaved.
  RunEnd run();

  TrainingJob& job();
  const RunDescription& description() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::train
