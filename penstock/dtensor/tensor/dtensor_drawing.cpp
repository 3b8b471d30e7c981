#include "penstock/dtensor/tensor/dtensor_drawing.h"

#include "penstock/dtensor/tensor/dtensor_payload.h"

namespace penstock {

std::string draw_sharding_text(const at::Tensor& tensor) {
  const detail::DTensorPayload& payload = detail::require_dtensor(tensor, "draw_sharding_text");
  return draw_sharding_text(payload.spec->shape(), payload.mesh.mesh(), payload.spec->placements());
}

std::string draw_sharding_svg(const at::Tensor& tensor) {
  const detail::DTensorPayload& payload = detail::require_dtensor(tensor, "draw_sharding_svg");
  return draw_sharding_svg(payload.spec->shape(), payload.mesh.mesh(), payload.spec->placements());
}

}  // namespace penstock
