// A distributed tensor as a picture of who holds what (shard_drawing.h), from what this rank knows: nothing is communicated,
// and no values are shown.
//
//   if (world.rank() == 0) fmt::print("{}", draw_sharding_text(weight));
//
// Throw TypeError for a plain tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "penstock/dtensor/plan/shard_drawing.h"

namespace penstock {

std::string draw_sharding_text(const at::Tensor& tensor);
std::string draw_sharding_svg(const at::Tensor& tensor);

}  // namespace penstock
