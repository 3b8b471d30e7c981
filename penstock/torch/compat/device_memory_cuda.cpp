#include <c10/cuda/CUDACachingAllocator.h>

#include "penstock/torch/compat/device_memory.h"

namespace penstock {

namespace {

constexpr std::size_t kAll = 0;  // the first of the counted block kinds is the sum of all

}  // namespace

std::int64_t live_device_bytes(c10::Device device) {
  return device.is_cuda()
             ? c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[kAll].current
             : 0;
}

std::int64_t peak_device_bytes(c10::Device device) {
  return device.is_cuda()
             ? c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[kAll].peak
             : 0;
}

void reset_peak_device_bytes(c10::Device device) {
  if (device.is_cuda()) c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

}  // namespace penstock
