// Draws which rank holds which part of a distributed tensor (shard_drawing.h), from information on this rank:
// nothing is communicated, and no values are shown.
//
//   if (world.rank() == 0) fmt::print("{}", draw_sharding_text(weight));
//
// Throws TypeError for a plain tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "penstock/dtensor/plan/shard_drawing.h"

namespace penstock {

std::string draw_sharding_text(const at::Tensor& tensor);
std::string draw_sharding_svg(const at::Tensor& tensor);

}  // namespace penstock
