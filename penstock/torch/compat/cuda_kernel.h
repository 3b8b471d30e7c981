// CUDA kernels compiled from source text at first use, for the device in use. Building Penstock therefore
// needs no CUDA compiler, and one build runs on every device that LibTorch supports.
//
//   static CudaKernel kernel({.name = "scale", .text = R"(extern "C" __global__ void scale(float* x,
//       float by, int n) {...})"});
//   kernel.launch(device, blocks, threads, x, by, n);       // on the current stream of the device
//
// NVRTC and the driver are loaded at first use: from LibTorch's installation, or from PENSTOCK_NVRTC (the
// path of libnvrtc). Kernels are compiled without fused multiply-add and with IEEE division, square root and
// subnormals, so that a kernel computes what the host computes from the same text with -ffp-contract=off.
//
// Exists only in builds with CUDA. Errors name the call that failed and include the compiler's log if there
// is one. Before capturing into a CUDA graph, launch the kernel once: kernels cannot be loaded during
// capture.
// Thread safety: any number of threads may launch the same kernel. A kernel is compiled once per compute
// capability and loaded once per device. It is never unloaded, because the driver may shut down before static
// objects are destroyed.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace penstock {

// Source text: a file, the headers it may include, and macros.
struct CudaSource {
  std::string name;  // extern "C" entry point; also in errors
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  // name as in #include "...", and text
  std::vector<std::pair<std::string, std::string>> macros;   // name, value
};

// Returns machine code for the compute capability (90 means 9.0), or PTX if NVRTC is older than the device.
std::string compile_cuda(const CudaSource& text, int capability);

class CudaKernel {
 public:
  explicit CudaKernel(CudaSource text) : text_(std::move(text)) {}
  CudaKernel(const CudaKernel&) = delete;
  CudaKernel& operator=(const CudaKernel&) = delete;

  // The arguments must have exactly the types of the kernel's parameters. Does nothing if `blocks` is 0.
  template <class... Arguments>
  void launch(int device, unsigned blocks, unsigned threads, const Arguments&... arguments) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    launch_pointers(device, blocks, threads, pointers);
  }

 private:
  void launch_pointers(int device, unsigned blocks, unsigned threads, void** arguments);
  void* function_for(int device);

  const CudaSource text_;
  std::mutex mutex_;
  std::map<int, void*> functions_;     // by device
  std::map<int, std::string> images_;  // by compute capability
};

// Compiled code of several functions, as compile_cuda returns it, on the devices where it is used. Like a
// CudaKernel it is never unloaded. Thread safety: any thread.
class CudaImage {
 public:
  // `name`: for errors.
  CudaImage(std::string name, std::string image) : name_(std::move(name)), image_(std::move(image)) {}
  CudaImage(const CudaImage&) = delete;
  CudaImage& operator=(const CudaImage&) = delete;

  // Throws StateError for code that the device cannot run.
  void load(int device);
  // Throws StateError if there is no such function.
  void* function(int device, const std::string& name);
  // On the current stream of the device. `arguments`: the addresses of what the function takes.
  void launch(void* function, int device, unsigned blocks, unsigned threads, void** arguments) const;

 private:
  const std::string name_, image_;
  std::mutex mutex_;
  std::map<int, void*> modules_;  // by device
};

// Returns the number of multiprocessors of a device.
int multiprocessors(int device);
// 90 means 9.0.
int cuda_capability(int device);
// NVRTC and what it compiles for, as text.
std::string cuda_compiler(int capability);

}  // namespace penstock
