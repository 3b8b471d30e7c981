// Receives the events of a training run: for progress bars, metric files and tests.
//
//   struct PrintLoss : train::Observer {
//     void on_step(const train::StepOutcome& outcome, const train::StepExtras&) override {
//       std::printf("step %lld: loss %.4f\n", static_cast<long long>(outcome.step), outcome.loss);
//     }
//   };
//
// Pass observers to Trainer (trainer.h). They are called on rank 0 only, by the thread that called
// Trainer::run, between steps; training continues when they return. Independent of LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"
#include "penstock/train_config.h"

namespace penstock::train {

// What is known before the first step.
struct RunDescription {
  TrainConfig config;                   // of the run
  std::filesystem::path folder;         // the run folder
  int ranks = 1;                        // number of processes
  std::string device;                   // of rank 0: "cpu", "cuda:0"
  std::string libtorch;                 // version of LibTorch
  std::int64_t parameters = 0;          // of the whole model; tied parameters count once
  double flops_per_token = 0;           // forward and backward
  double peak_flops = 0;                // per second, of all ranks, measured on large products; 0: unknown
  std::vector<std::string> partition;   // what each stage holds, one line per stage
  std::int64_t tokens_per_step = 0;     // in the global batch
  std::uint64_t training_tokens = 0;    // in the training data
  std::uint64_t validation_tokens = 0;  // in the validation data
  std::int64_t first_step = 0;          // steps already done in the resumed checkpoint
  std::string resumed_from;             // path of the checkpoint; empty: from the beginning
};

// Durations of the phases of a step on this rank, in seconds.
struct StepTimes {
  double data = 0;      // waiting for the batch and moving it to the device
  double schedule = 0;  // forward and backward of all microbatches; on a GPU until the device has finished
  double sync = 0;      // sums over replicas and tied weights that did not overlap with compute
  double update = 0;    // clipping and the optimizer
  double total = 0;     // the whole step
};

// An auxiliary loss of a step (ModelPlan::auxiliary).
struct LossTerm {
  std::string name;   // "balance"
  double value = 0;   // unweighted: the mean over the microbatches of the global batch
  double weight = 0;  // its factor in the training loss, which is the loss plus all weight * value
};

// A forward that runs as a graph from now on (training.compile): captured and compiled, or loaded.
struct CompiledForward {
  int stage = 0;  // of the pipeline
  std::int64_t graph =
      0;  // how many graphs this stage has now; more than one for training: it was captured again
  std::int64_t nodes = 0;  // operators, forward and backward
  // Operators that run in the W actions of a schedule that splits the backward.
  std::int64_t deferred = 0;
  double seconds = 0;  // for capturing and compiling, or loading
  // Why the graphs that the stage had before were not valid: the input and the difference; empty for the
  // first.
  std::string reason = {};
  // Where it came from: captured, cache (PENSTOCK_CACHE) or artifact (training.artifact).
  std::string source = "captured";
};

// The result of one step. All values but the times are the same on every rank.
struct StepOutcome {
  std::int64_t step = 0;  // steps done, including this one
  double loss = 0;        // mean over the targets that are not ignored
  double grad_norm = 0;   // before clipping
  double lr = 0;          // learning rate
  double loss_scale = 1;  // fp16: the factor on the loss
  bool skipped = false;   // fp16: the gradients overflowed and the update was skipped
  // Relative error (root mean square) of what was sent between stages in a narrower dtype
  // (layout.border_dtype); 0: nothing was rounded.
  double border_error = 0;
  std::int64_t tokens = 0;  // of the global batch
  bool stop = false;        // some rank requested the end of the run
  StepTimes times;          // of this rank
  // The auxiliary losses in the order of the model; empty if it has none.
  std::vector<LossTerm> auxiliary = {};
  // The graphs that this rank got since the step before, validations included (training.compile).
  std::vector<CompiledForward> compiled = {};
  std::int64_t first_captures = 0;  // on all ranks: the first graphs for a kind of call
  std::int64_t recaptures = 0;      // on all ranks: graphs for a kind of call that had one
  std::int64_t loads = 0;           // on all ranks: graphs that were loaded instead of captured
};

// Additional measurements of a step.
struct StepExtras {
  double tokens_per_second = 0;     // of all ranks, in this step
  double seconds_left = 0;          // until the last step, estimated from the recent ones
  std::int64_t resident_bytes = 0;  // memory of this process
  std::int64_t device_bytes = 0;    // peak on the device; 0 on the CPU
};

// Why a run ended.
enum class RunEnd {
  Finished,   // all steps are done
  Stopped,    // request_stop() was called on some rank
  TimeLimit,  // training.time_limit_s
  NotSaved    // the last checkpoint could not be written: progress since the previous one is lost
};

// Base class of observers. The default implementations do nothing. An exception ends the run.
class Observer {
 public:
  // Observers are owned by the caller of Trainer.
  virtual ~Observer() = default;
  // Called once, before the first step.
  virtual void on_start(const RunDescription& /*run*/) {}
  // Called after the steps that output.metrics_every selects, those in which graphs were captured or
  // after the last one.
  virtual void on_step(const StepOutcome& /*outcome*/, const StepExtras& /*extras*/) {}
  // Called after each validation with the mean loss and its duration.
  virtual void on_validation(std::int64_t /*step*/, double /*loss*/, double /*seconds*/) {}
  // Called when the checkpoint of `step` is on disk, which may be some steps later.
  virtual void on_checkpoint(std::int64_t /*step*/, const checkpoint::SaveStall& /*stall*/) {}
  // Called when the checkpoint of `step` could not be written; `error` says why.
  virtual void on_checkpoint_failed(std::int64_t /*step*/, const std::string& /*error*/) {}
  // Called when the trace of a step has been written to `path`.
  virtual void on_trace(std::int64_t /*step*/, const std::filesystem::path& /*path*/) {}
  // Called once at the end, with the number of steps done; not called if the run ends with an exception.
  virtual void on_end(RunEnd /*end*/, std::int64_t /*step*/) {}
};

// Thrown by Trainer::run on every rank when a loss or gradient is NaN or infinite (fp16 skips such steps
// instead). The message says where it first appeared.
class NotFiniteError : public Error {
 public:
  using Error::Error;
};

}  // namespace penstock::train
