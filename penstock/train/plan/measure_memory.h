// Measures how much memory training steps use on this rank.
//
//   count_cpu_memory();                                         // before any allocation (torch/cpu_memory.h)
//   const MeasuredMemory measured = measure_memory(world, config, data, 3);
//
// Two unmeasured steps come first: they create optimizer state and size the buffers. Then memory is read
// after every instruction of the schedule, between kernels, so that activations are what microbatches keep
// and not temporary memory of kernels; that is included in `together`. Peaks of different columns may have
// occurred at different moments.
//
// On the CPU, the rank must be a separate process: the count is that of the process.
#pragma once

#include <cstdint>

#include "penstock/train/job/job.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace penstock::train {

// Peaks in bytes.
struct MeasuredMemory {
  std::int64_t parameters = 0;
  std::int64_t gathered = 0;
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;
  std::int64_t activations = 0;
  std::int64_t together = 0;  // of all tensors of the process on the device, including within kernels
};

// [collective] Throws StateError on the CPU unless count_cpu_memory() was called.
MeasuredMemory measure_memory(const comm::World& world, const TrainConfig& config, TrainingData data,
                              int steps);

}  // namespace penstock::train
