// Describes the layout of a parameter as text that two ranks can compare.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace penstock {

// "blocks.0.up.weight: Float[32, 16], S(0) on [2], trainable". Does not include strides, values or the ranks
// of a distributed tensor's mesh: replicas on other ranks have the same text.
std::string layout_text(std::string_view name, const at::Tensor& parameter);

}  // namespace penstock
