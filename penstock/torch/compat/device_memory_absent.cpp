// Replaces device_memory_cuda.cpp in builds without CUDA.
#include "penstock/torch/compat/device_memory.h"

namespace penstock {

std::int64_t live_device_bytes(c10::Device) { return 0; }
std::int64_t peak_device_bytes(c10::Device) { return 0; }
void reset_peak_device_bytes(c10::Device) {}

}  // namespace penstock
