// Receives the events of a run: for progress bars, metric files and tests. Called on rank 0 only, by the
// training thread, between steps. Independent of Torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/save_stall.h"
#include "penstock/train_config.h"
#include "penstock/train/report/step_outcome.h"

namespace penstock::train {

// What is known before the first step.
struct RunDescription {
  TrainConfig config;
  std::filesystem::path folder;
  int ranks = 1;
  std::string device;
  std::string libtorch;
  std::int64_t parameters = 0;           // of the whole model; tied parameters count once
  double flops_per_token = 0;            // forward and backward
  double peak_flops = 0;                 // per second, of all ranks, measured on large matrix products; 0: unknown
  std::vector<std::string> partition;    // one line per stage
  std::int64_t tokens_per_step = 0;
  std::uint64_t training_tokens = 0;     // in the data
  std::uint64_t validation_tokens = 0;
  std::int64_t first_step = 0;           // steps already done in the resumed checkpoint
  std::string resumed_from;              // path of the checkpoint; empty: from the beginning
};

// Additional measurements of a step.
struct StepExtras {
  double tokens_per_second = 0;
  double seconds_left = 0;                // estimated from the last steps
  std::int64_t resident_bytes = 0;        // of this process
  std::int64_t device_bytes = 0;          // peak on the device; 0 on the CPU
};

// NotSaved: the last checkpoint could not be written, so that the progress since the previous one is lost.
enum class RunEnd { Finished, Stopped, TimeLimit, NotSaved };

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_start(const RunDescription&) {}
  virtual void on_step(const StepOutcome&, const StepExtras&) {}
  virtual void on_validation(std::int64_t /*step*/, double /*loss*/, double /*seconds*/) {}
  // Called when the checkpoint is on disk, which is some steps after `step`.
  virtual void on_checkpoint(std::int64_t /*step*/, const checkpoint::SaveStall&) {}
  virtual void on_checkpoint_failed(std::int64_t /*step*/, const std::string& /*error*/) {}
  virtual void on_trace(std::int64_t /*step*/, const std::filesystem::path&) {}
  virtual void on_end(RunEnd, std::int64_t /*step*/) {}
};

}  // namespace penstock::train
