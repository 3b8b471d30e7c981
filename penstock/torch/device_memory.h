// Memory that LibTorch has given out on a device.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace penstock {

// The most bytes that tensors have held at one time since the process began; 0 for devices that are not CUDA ones. Any thread.
std::int64_t peak_device_bytes(c10::Device device);

}  // namespace penstock
