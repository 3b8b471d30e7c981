#include "penstock/dtensor/tensor/layout_text.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "penstock/dtensor.h"

namespace penstock {

std::string layout_text(std::string_view name, const at::Tensor& parameter) {
  const std::string placed = is_dtensor(parameter)
                                 ? fmt::format(", {} on [{}]", to_string(placements_of(parameter)),
                                               fmt::join(mesh_of(parameter).shape(), ", "))
                                 : "";
  return fmt::format("{}: {}[{}]{}, {}", name, c10::toString(parameter.scalar_type()),
                     fmt::join(parameter.sizes(), ", "), placed,
                     parameter.requires_grad() ? "trainable" : "frozen");
}

}  // namespace penstock
