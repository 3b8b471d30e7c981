#include "penstock/torch/compat/device_name.h"

#include <ATen/Version.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace penstock {
namespace {

constexpr std::string_view kCapability = "CPU capability usage: ";

// Where the line about this processor is in LibTorch's description of its build, and where it ends.
std::pair<std::size_t, std::size_t> capability_line(const std::string& config) {
  const std::size_t begin = config.find(kCapability);
  if (begin == std::string::npos) return {config.size(), config.size()};
  return {begin, std::min(config.find('\n', begin), config.size())};
}

}  // namespace

std::string torch_build() {
  std::string config = at::show_config();
  const auto [begin, end] = capability_line(config);
  return config.erase(begin, end - begin);
}

std::string device_name(c10::Device device) {
  if (device.is_cpu()) {
    const std::string config = at::show_config();
    const auto [begin, end] = capability_line(config);
    return begin == end
               ? "cpu"
               : "cpu " + config.substr(begin + kCapability.size(), end - begin - kCapability.size());
  }
  const std::string model = device.is_cuda() ? detail::cuda_device_name(device) : std::string();
  return c10::Device(device.type()).str() + (model.empty() ? "" : " " + model);
}

}  // namespace penstock
