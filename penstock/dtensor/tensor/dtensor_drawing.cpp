#include "penstock/dtensor.h"

#include "penstock/dtensor/plan/redistribute_plan.h"
#include "penstock/dtensor/plan/shard_drawing.h"
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

std::string describe_redistribution(const at::Tensor& tensor, const Placements& placements) {
  const DTensorSpec& spec = *detail::require_dtensor(tensor, "describe_redistribution").spec;
  return plan_redistribute({spec.shape(), static_cast<std::int64_t>(tensor.element_size())},
                           spec.mesh_shape(), spec.placements(), placements)
      .to_string();
}

}  // namespace penstock
