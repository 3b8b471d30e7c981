// Initial values: a function of (seed, parameter name, element), hence the same bits in every layout, on
// every device, in one process or many. Matrices are normally distributed; those that write to the residual
// stream (attention.output, feed.down) have a standard deviation smaller by sqrt(2 * layers), so that the
// stream does not grow with depth. Norms are 1.
//
//   initialize(*stage, {.seed = 42});               // plain or distributed parameters; each rank computes its own part
#pragma once

#include <cstdint>

#include "penstock/transformer.h"

namespace penstock::models {

struct InitOptions {
  std::uint64_t seed = 0;
  double deviation = 0.02;
  bool scale_residual = true;
};

// Throws ValueError for a deviation that is not positive.
void initialize(TransformerStageImpl& stage, const InitOptions& how = {});

}  // namespace penstock::models
