// What one training step gave: numbers that are the same on every rank, and the times of this one. Knows nothing of Torch.
#pragma once

#include <cstdint>

namespace penstock::train {

// Seconds on this rank.
struct StepTimes {
  double data = 0;      // waiting for the batch and moving it to the device
  double schedule = 0;  // forward and backward of all microbatches; on a GPU until the device has done them
  double sync = 0;      // sums over replicas and tied weights that were not hidden
  double update = 0;    // clipping and the optimizer
  double total = 0;
};

struct StepOutcome {
  std::int64_t step = 0;        // steps done, this one included
  double loss = 0;              // mean over the targets that count
  double grad_norm = 0;         // before clipping
  double lr = 0;
  double loss_scale = 1;
  bool skipped = false;         // fp16: the gradients overflowed and the parameters stayed
  std::int64_t tokens = 0;      // of the whole batch
  bool stop = false;            // some rank asked for the end
  StepTimes times;
};

}  // namespace penstock::train
