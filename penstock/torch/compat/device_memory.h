// Memory that LibTorch has allocated on a CUDA device. Returns 0 for other devices; cpu_memory.h counts CPU
// memory. Thread safety: any thread.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace penstock {

// Bytes held by tensors now.
std::int64_t live_device_bytes(c10::Device device);
// Peak since the process started or since the last reset.
std::int64_t peak_device_bytes(c10::Device device);
void reset_peak_device_bytes(c10::Device device);

}  // namespace penstock
