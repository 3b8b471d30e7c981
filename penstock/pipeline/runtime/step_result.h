// What a step of a pipeline returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "penstock/pytree.h"

namespace penstock {

struct StepResult {
  // On ranks with a last stage: the results of the microbatches joined, and their losses in order. Without graphs.
  std::optional<Tree> output;
  std::vector<at::Tensor> losses;
};

}  // namespace penstock
