#include <c10/cuda/CUDACachingAllocator.h>

#include "penstock/torch/device_memory.h"

namespace penstock {

std::int64_t peak_device_bytes(c10::Device device) {
  if (!device.is_cuda()) return 0;
  constexpr std::size_t kAll = 0;  // the first of the kinds of blocks that are counted is their sum
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[kAll].peak;
}

}  // namespace penstock
