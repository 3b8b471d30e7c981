// How a parameter is laid out, as text that two ranks can compare.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace penstock {

// "blocks.0.up.weight: Float[32, 16], S(0) on [2], trainable". Says nothing about strides, values and which ranks the mesh of a
// distributed tensor has: copies on other ranks have the same text.
std::string layout_text(std::string_view name, const at::Tensor& parameter);

}  // namespace penstock
