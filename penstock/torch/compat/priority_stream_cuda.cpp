#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "penstock/torch/compat/streams.h"

namespace penstock {

std::optional<c10::Stream> priority_stream(c10::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::cuda::current_device();
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> made;
  const std::lock_guard lock(mutex);
  const auto known = made.find(index);
  if (known != made.end()) return known->second;
  const c10::cuda::CUDAGuard guard(index);
  // In CUDA a lower number means a higher priority; the greatest priority is the second of the two.
  int least = 0, greatest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // Never destroyed: the driver may shut down before static objects are destroyed.
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
  return made.emplace(index, c10::cuda::getStreamFromExternal(stream, index).unwrap()).first->second;
}

}  // namespace penstock
