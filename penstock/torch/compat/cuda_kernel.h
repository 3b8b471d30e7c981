// CUDA kernels from source text, compiled when they are first needed, for the device at hand. So Penstock needs no CUDA compiler
// to be built, and one build serves every device that LibTorch serves.
//
//   static CudaKernel kernel({.name = "scale", .text = R"(extern "C" __global__ void scale(float* x, float by, int n) {...})"});
//   kernel.launch(device, blocks, threads, x, by, n);       // on the current stream of the device
//
// NVRTC and the driver are loaded at the first use: from where LibTorch has them, or from PENSTOCK_NVRTC (path of libnvrtc).
// Compiled without fused multiply-add, with IEEE division, square root and subnormals: a kernel computes what the host computes
// from the same text with -ffp-contract=off.
//
// Exists only in builds with CUDA. Every failure is an error that says which call failed, with the compiler's log if there is one.
// Capture into a CUDA graph: launch once before it, because loading a kernel is not allowed during capture.
// Thread rule: any number of threads may launch one kernel. A kernel is compiled once for each compute capability and loaded once
// for each device; it stays loaded until the process ends, because at that time the driver may be gone before us.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace penstock {

// Source text: a file, what it may include, and macros.
struct CudaText {
  std::string name;                                           // of the entry, extern "C"; also in errors
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  // name as in #include "...", text
  std::vector<std::pair<std::string, std::string>> macros;   // name, value
};

// Machine code for the compute capability (90: 9.0), or PTX where NVRTC is older than the device.
std::string compile_cuda(const CudaText& text, int capability);

class CudaKernel {
 public:
  explicit CudaKernel(CudaText text) : text_(std::move(text)) {}
  CudaKernel(const CudaKernel&) = delete;
  CudaKernel& operator=(const CudaKernel&) = delete;

  // The arguments must have exactly the types of the kernel's parameters. Nothing is launched for no blocks.
  template <class... Arguments>
  void launch(int device, unsigned blocks, unsigned threads, const Arguments&... arguments) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    launch_pointers(device, blocks, threads, pointers);
  }

 private:
  void launch_pointers(int device, unsigned blocks, unsigned threads, void** arguments);
  void* function_for(int device);

  const CudaText text_;
  std::mutex mutex_;
  std::map<int, void*> functions_;     // by device
  std::map<int, std::string> images_;  // by compute capability
};

// Multiprocessors of a device.
int multiprocessors(int device);

}  // namespace penstock
