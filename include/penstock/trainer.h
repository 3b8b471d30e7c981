// Trains a model as configured: steps, validation, checkpoints, traces, and an orderly end.
//
//   train::ConfigSources sources{.arguments = {"--pp", "2", "--steps", "1000"}};
//   train::TrainConfig config = train::load_config(sources).config;
//   train::Trainer trainer(world, config, "runs/first");
//   train::RunEnd end = trainer.run();
//
// The run folder contains data/ (token shards), checkpoints/ and traces/. A run continues from the newest
// valid checkpoint in it, whichever layout wrote it, and reaches the losses that it would have reached
// without the interruption.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/observer.h"
#include "penstock/train_config.h"
#include "penstock/trainable_model.h"
#include "penstock/world.h"

namespace penstock::train {

// Creates a model for a configuration. Throws ConfigError for settings that the model cannot have.
using ModelFactory = std::function<std::shared_ptr<models::TrainableModel>(const TrainConfig& config)>;

// Makes a model of this program available to the trainer as model.type = `name`. Throws ValueError for a name
// that is in use. Call it before making a Trainer, on every rank.
void register_model(const std::string& name, ModelFactory factory);

// Ends the runs of this process after their current step, with a checkpoint. Calling it on one rank is
// enough. Safe in a signal handler; Penstock installs none in a Trainer.
void request_stop() noexcept;
// Returns whether request_stop() was called in this process.
bool stop_requested() noexcept;

// Options of a Trainer that are not part of the configuration.
struct TrainerOptions {
  // Called on rank 0 when all ranks accept the start, before anything in the folder changes. An exception
  // refuses the start on all ranks.
  std::function<void()> accepted;
};

// One run. All functions but description() are collective over the world. Thread safety: one thread.
class Trainer {
 public:
  // Opens the data, builds the model, and loads the checkpoint to continue from, if any (checkpoint.resume).
  // Observers are used on rank 0; they must outlive the trainer.
  //
  // Throws on all ranks if the start is refused: ConfigError for a layout that does not fit the world, the
  // model or the data, CheckpointError for damaged checkpoints. The folder is then unchanged; token shards
  // that were made for this start are removed.
  Trainer(const comm::World& world, const TrainConfig& config, std::filesystem::path folder,
          std::vector<Observer*> observers = {}, TrainerOptions options = {});
  // Abandons a checkpoint that is still being written, which happens only after an exception of run().
  ~Trainer();

  // Trains to the last step, or until the run is asked to end: by request_stop() or the time limit, after a
  // step that all ranks agree on, with a checkpoint.
  //
  // A checkpoint that cannot be written does not end the run if there is an older one
  // (checkpoint.on_failure): the error is logged, and the next attempt is made at the next checkpoint and at
  // the end. If the last checkpoint cannot be written, the result is RunEnd::NotSaved on every rank.
  // Throws NotFiniteError if a loss or gradient becomes NaN or infinite, and CommError if a rank is lost.
  RunEnd run();

  // Returns what is known before the first step. The same values that observers receive.
  const RunDescription& description() const;

 private:
  friend struct TrainerAccess;
  struct Impl;
  explicit Trainer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::train
