// Checks whether this machine can run a configuration before ranks are started, folders are created or memory
// is allocated: GPUs, a precision that the device supports, memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/train_config.h"

namespace penstock::train {

// A lower bound of the memory needed at one time, by purpose. The real need is larger; a configuration whose
// lower bound exceeds the available memory cannot run.
struct MinimumMemory {
  struct Part {
    std::string what, remedy;  // "logits of a microbatch", "lower model.vocabulary"
    double bytes = 0;
  };
  std::vector<Part> parts;
  double bytes() const;
};

// For training with `ranks` processes of the layout on one machine, on the CPU.
MinimumMemory minimum_memory(const TrainConfig& config, std::int64_t ranks);
// For one row of data through one part of the model, as a dry run measures it.
MinimumMemory minimum_memory_of_parts(const TrainConfig& config);

// For one process that holds the whole model without running it, as a capture does.
MinimumMemory minimum_memory_of_capture(const TrainConfig& config);

// For one process that holds one stage after the other without running them, as penstock compile does.
MinimumMemory minimum_memory_of_stage(const TrainConfig& config);

// Throws ConfigError that names the largest need if the total exceeds the available memory.
void require_memory(const MinimumMemory& need, std::int64_t available_bytes);

// Throws ConfigError for a precision that this LibTorch does not support on `device`.
void require_precision(const TrainConfig& config, at::Device device);

// Runs all checks for `ranks` of the layout on this machine. Throws ConfigError.
void check_host(const TrainConfig& config, std::int64_t ranks);

}  // namespace penstock::train
