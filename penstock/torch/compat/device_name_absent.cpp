#include "penstock/torch/compat/device_name.h"

namespace penstock {

std::string detail::cuda_device_name(c10::Device) { return {}; }

}  // namespace penstock
