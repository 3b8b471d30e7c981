#include "penstock/torch/compat/device_name.h"

#include <ATen/Version.h>

namespace penstock {

std::string device_name(c10::Device device) {
  if (device.is_cpu()) return "cpu " + at::get_cpu_capability();
  const std::string model = device.is_cuda() ? detail::cuda_device_name(device) : std::string();
  return c10::Device(device.type()).str() + (model.empty() ? "" : " " + model);
}

}  // namespace penstock
