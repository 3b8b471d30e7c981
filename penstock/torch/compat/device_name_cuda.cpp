#include <ATen/cuda/CUDAContext.h>
#include <fmt/format.h>

#include "penstock/torch/compat/device_name.h"

namespace penstock {

std::string detail::cuda_device_name(c10::Device device) {
  const auto* properties = device.has_index() ? at::cuda::getDeviceProperties(device.index())
                                              : at::cuda::getCurrentDeviceProperties();
  return fmt::format("{}, compute capability {}.{}", properties->name, properties->major, properties->minor);
}

}  // namespace penstock
