// Memory that LibTorch has given out on a CUDA device. 0 for devices that are not CUDA ones: cpu_memory.h counts there.
// Thread rule: any thread.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace penstock {

// Bytes that tensors hold now.
std::int64_t live_device_bytes(c10::Device device);
// The most that they have held at one time since the process began, or since the last reset.
std::int64_t peak_device_bytes(c10::Device device);
void reset_peak_device_bytes(c10::Device device);

}  // namespace penstock
