// The result of a pipeline step.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "penstock/pytree.h"

namespace penstock {

struct StepResult {
  // On ranks with a last stage: the merged results of the microbatches, and their losses in order. Without
  // graphs.
  std::optional<Tree> output;
  std::vector<at::Tensor> losses;
};

}  // namespace penstock
