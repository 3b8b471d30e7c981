// Checks whether this machine can run a configuration before ranks are started, folders are created or memory
// is allocated: GPUs, a precision that the device supports, memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/train_config.h"

namespace penstock::train {

// Memory that is certainly needed at one time, by what it is for. The real need is larger; a configuration that needs more than there is
// cannot run.
struct LeastNeed {
  struct Part {
    std::string what, remedy;  // "logits of a microbatch", "lower model.vocabulary"
    double bytes = 0;
  };
  std::vector<Part> parts;
  double bytes() const;
};

// Of training by `ranks` processes of the layout on one machine, on the CPU.
LeastNeed least_need(const TrainConfig& config, std::int64_t ranks);
// For training with `ranks` processes of the layout on one machine, on the CPU.
LeastNeed least_need_of_parts(const TrainConfig& config);

// Of one process that holds the whole model and runs nothing, as a capture does.
LeastNeed least_need_of_capture(const TrainConfig& config);

// Throws ConfigError that names what needs most, when the machine has less than that.
void require_memory(const LeastNeed& need, std::int64_t available_bytes);

// Throws ConfigError for a precision that `device` cannot compute in with this LibTorch.
void require_precision(const TrainConfig& config, at::Device device);

// All of it for `ranks` of the layout that would run on this machine. Throws ConfigError.
void check_host(const TrainConfig& config, std::int64_t ranks);

}  // namespace penstock::train
