// The model of a device, for keys of compiled code: "cpu AVX2", "cuda NVIDIA H200, compute capability 9.0".
// Thread safety: any thread.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace penstock {

// Without the index of the device: equal for devices of one model.
std::string device_name(c10::Device device);

// How LibTorch was built, in its own words, without anything about this machine.
std::string torch_build();

namespace detail {
// Empty if this build has no CUDA.
std::string cuda_device_name(c10::Device device);
}  // namespace detail

}  // namespace penstock
