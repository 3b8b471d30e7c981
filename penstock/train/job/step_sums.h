// The losses of a step of this rank as numbers, read from the device in one transfer.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace penstock::train {

struct StepSums {
  double loss = 0;                // of all microbatches whose last stage is on this rank
  std::vector<double> auxiliary;  // as given; 0 for what is undefined
};

// Adds the scalars `losses` in order, and reads the scalars `auxiliary`, which may be undefined. Waits for
// the device once.
StepSums read_sums(const std::vector<at::Tensor>& losses, const std::vector<at::Tensor>& auxiliary);

}  // namespace penstock::train
