// The result of one training step: values that are the same on every rank, and this rank's times. Independent
// of Torch.
#pragma once

#include <cstdint>

namespace penstock::train {

// Seconds on this rank.
struct StepTimes {
  double data = 0;      // waiting for the batch and moving it to the device
  double schedule = 0;  // forward and backward of all microbatches; on a GPU until the device has finished
  double sync = 0;      // sums over replicas and tied weights that did not overlap with compute
  double update = 0;    // clipping and the optimizer
  double total = 0;
};

struct StepOutcome {
  std::int64_t step = 0;        // steps done, including this one
  double loss = 0;              // mean over the targets that are not ignored
  double grad_norm = 0;         // before clipping
  double lr = 0;
  double loss_scale = 1;
  bool skipped = false;         // fp16: the gradients overflowed and the update was skipped
  std::int64_t tokens = 0;      // of the global batch
  bool stop = false;            // some rank requested the end of the run
  StepTimes times;
};

}  // namespace penstock::train
