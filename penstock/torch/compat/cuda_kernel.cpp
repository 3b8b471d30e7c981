#include "penstock/torch/compat/cuda_kernel.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

// The functions of NVRTC and the driver that are used, declared as in their C headers. LibTorch ships neither
// header.
using Program = struct ProgramTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Context = struct ContextTag*;

struct Nvrtc {
  const char* (*error_text)(int);
  int (*create)(Program*, const char* text, const char* name, int headers, const char* const* texts,
                const char* const* names);
  int (*destroy)(Program*);
  int (*compile)(Program, int options, const char* const*);
  int (*log_size)(Program, std::size_t*);
  int (*log)(Program, char*);
  int (*ptx_size)(Program, std::size_t*);
  int (*ptx)(Program, char*);
  int (*cubin_size)(Program, std::size_t*);
  int (*cubin)(Program, char*);
  int (*capability_count)(int*);
  int (*capabilities)(int*);
  int (*version)(int* major, int* minor);
};

struct Driver {
  int (*error_text)(int, const char**);
  int (*current_context)(Context*);
  int (*load)(Module*, const void* image);
  int (*function)(Function*, Module, const char* name);
  int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cudaStream_t,
                void**, void**);
};

// Returns the folder of LibTorch's CUDA library.
std::filesystem::path torch_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&at::cuda::getCurrentDeviceProperties), &info) == 0 ||
      info.dli_fname == nullptr)
    return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

// Returns the first file that can be loaded. The dynamic linker searches its usual paths for names without a
// folder. Loaded libraries are never unloaded.
void* load_first(const char* what, const std::vector<std::string>& files, const char* remedy) {
  std::string reasons;
  for (const auto& file : files) {
    if (void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    const char* reason = dlerror();
    reasons += fmt::format("\n  {}", reason != nullptr ? reason : file.c_str());
  }
  throw ConfigError(fmt::format("{} cannot be loaded; {}. Tried:{}", what, remedy, reasons));
}

template <class Pointer>
void resolve(void* library, const char* name, Pointer& pointer) {
  pointer = reinterpret_cast<Pointer>(dlsym(library, name));
  if (pointer == nullptr)
    throw ConfigError(describe("CUDA library", fmt::format("no function {}", name), "CUDA 11.2 or later",
                               "install a newer CUDA"));
}

std::vector<std::string> nvrtc_files() {
  // If the user gives a path, no other is tried.
  if (const auto given = env_text("PENSTOCK_NVRTC")) return {*given};
  const std::string major = std::to_string(CUDART_VERSION / 1000);
  const std::string name = "libnvrtc.so." + (major == "11" ? "11.2" : major);
  const std::filesystem::path torch = torch_folder();
  return {
      name,
      // LibTorch's own stub links against the NVRTC that LibTorch was built with; symbols are found through
      // it.
      (torch / "libcaffe2_nvrtc.so").string(),
      (torch / ".." / ".." / "nvidia" / ("cu" + major) / "lib" / name)
          .string(),  // Python packages from CUDA 13 on
      (torch / ".." / ".." / "nvidia" / "cuda_nvrtc" / "lib" / name).string(),  // and before
      "/usr/local/cuda/lib64/" + name,
  };
}

const Nvrtc& nvrtc() {
  static const Nvrtc functions = [] {
    void* library = load_first("NVRTC, which compiles CUDA kernels,", nvrtc_files(),
                               "install it or set PENSTOCK_NVRTC to the path of libnvrtc");
    Nvrtc f{};
    resolve(library, "nvrtcGetErrorString", f.error_text);
    resolve(library, "nvrtcCreateProgram", f.create);
    resolve(library, "nvrtcDestroyProgram", f.destroy);
    resolve(library, "nvrtcCompileProgram", f.compile);
    resolve(library, "nvrtcGetProgramLogSize", f.log_size);
    resolve(library, "nvrtcGetProgramLog", f.log);
    resolve(library, "nvrtcGetPTXSize", f.ptx_size);
    resolve(library, "nvrtcGetPTX", f.ptx);
    resolve(library, "nvrtcGetCUBINSize", f.cubin_size);
    resolve(library, "nvrtcGetCUBIN", f.cubin);
    resolve(library, "nvrtcGetNumSupportedArchs", f.capability_count);
    resolve(library, "nvrtcGetSupportedArchs", f.capabilities);
    resolve(library, "nvrtcVersion", f.version);
    return f;
  }();
  return functions;
}

const Driver& driver() {
  static const Driver functions = [] {
    void* library = load_first("the CUDA driver", {"libcuda.so.1"}, "install the NVIDIA driver");
    Driver f{};
    resolve(library, "cuGetErrorString", f.error_text);
    resolve(library, "cuCtxGetCurrent", f.current_context);
    resolve(library, "cuModuleLoadData", f.load);
    resolve(library, "cuModuleGetFunction", f.function);
    resolve(library, "cuLaunchKernel", f.launch);
    return f;
  }();
  return functions;
}

void check_nvrtc(int result, const char* call, const std::string& kernel) {
  if (result != 0)
    throw StateError(fmt::format("CUDA kernel {}: {} failed: {}", kernel, call, nvrtc().error_text(result)));
}

void check_driver(int result, const char* call, const std::string& kernel, int device) {
  if (result == 0) return;
  const char* text = nullptr;
  if (driver().error_text(result, &text) != 0 || text == nullptr) text = "unknown error";
  throw StateError(fmt::format("CUDA kernel {} on device {}: {} failed: {} (error {})", kernel, device, call,
                               text, result));
}

class ProgramHolder {
 public:
  explicit ProgramHolder(const CudaSource& text) {
    std::vector<const char*> names, texts;
    for (const auto& [name, content] : text.headers) {
      names.push_back(name.c_str());
      texts.push_back(content.c_str());
    }
    check_nvrtc(nvrtc().create(&program_, text.text.c_str(), (text.name + ".cu").c_str(),
                               static_cast<int>(names.size()), texts.data(), names.data()),
                "nvrtcCreateProgram", text.name);
  }
  ~ProgramHolder() { nvrtc().destroy(&program_); }
  ProgramHolder(const ProgramHolder&) = delete;
  ProgramHolder& operator=(const ProgramHolder&) = delete;
  Program get() const { return program_; }

 private:
  Program program_ = nullptr;
};

std::string read(int (*size_of)(Program, std::size_t*), int (*read_into)(Program, char*), Program program,
                 const char* call, const std::string& kernel) {
  std::size_t size = 0;
  check_nvrtc(size_of(program, &size), call, kernel);
  std::string bytes(size, '\0');
  if (size > 0) check_nvrtc(read_into(program, bytes.data()), call, kernel);
  return bytes;
}

// Compiles for the device itself, or to PTX of the newest lower capability that NVRTC supports.
std::string architecture_for(int capability, const std::string& kernel, bool& machine_code) {
  int count = 0;
  check_nvrtc(nvrtc().capability_count(&count), "nvrtcGetNumSupportedArchs", kernel);
  std::vector<int> known(static_cast<std::size_t>(std::max(count, 0)));
  if (!known.empty()) check_nvrtc(nvrtc().capabilities(known.data()), "nvrtcGetSupportedArchs", kernel);
  int best = 0;
  for (const int one : known)
    if (one <= capability) best = std::max(best, one);
  if (best == 0)
    throw ConfigError(describe(fmt::format("CUDA kernel {}: compute capability of the device", kernel),
                               fmt::format("{}.{}", capability / 10, capability % 10),
                               fmt::format("one of {}", fmt::join(known, ", ")),
                               "use a CUDA version that supports the device"));
  machine_code = best == capability;
  return fmt::format("--gpu-architecture={}_{}", machine_code ? "sm" : "compute", best);
}

}  // namespace

std::string compile_cuda(const CudaSource& text, int capability) {
  bool machine_code = false;
  std::vector<std::string> options = {architecture_for(capability, text.name, machine_code),
                                      "--std=c++17",
                                      "--fmad=false",
                                      "--ftz=false",
                                      "--prec-div=true",
                                      "--prec-sqrt=true"};
  for (const auto& [name, value] : text.macros)
    options.push_back(fmt::format("--define-macro={}={}", name, value));
  std::vector<const char*> pointers;
  for (const auto& option : options) pointers.push_back(option.c_str());

  const ProgramHolder program(text);
  const int result = nvrtc().compile(program.get(), static_cast<int>(pointers.size()), pointers.data());
  if (result != 0)
    throw StateError(fmt::format(
        "CUDA kernel {} cannot be compiled: {}; options {}; log:\n{}", text.name, nvrtc().error_text(result),
        fmt::join(options, " "),
        read(nvrtc().log_size, nvrtc().log, program.get(), "nvrtcGetProgramLog", text.name).c_str()));
  return machine_code ? read(nvrtc().cubin_size, nvrtc().cubin, program.get(), "nvrtcGetCUBIN", text.name)
                      : read(nvrtc().ptx_size, nvrtc().ptx, program.get(), "nvrtcGetPTX", text.name);
}

namespace {

// The driver needs a context. The CUDA runtime creates one for a thread at its first call, which autograd's
// worker threads may not have made yet. The device is the current one.
void require_context(const std::string& name, int device) {
  Context context = nullptr;
  check_driver(driver().current_context(&context), "cuCtxGetCurrent", name, device);
  if (context == nullptr) C10_CUDA_CHECK(cudaFree(nullptr));
}

void launch_on_stream(const std::string& name, void* function, int device, unsigned blocks, unsigned threads,
                      void** arguments) {
  const auto stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
  check_driver(driver().launch(static_cast<Function>(function), blocks, 1, 1, threads, 1, 1, 0,
                               stream.stream(), arguments, nullptr),
               "cuLaunchKernel", name, device);
}

}  // namespace

void* CudaKernel::function_for(int device) {
  const std::lock_guard lock(mutex_);
  if (const auto found = functions_.find(device); found != functions_.end()) return found->second;
  const int capability = cuda_capability(device);
  auto image = images_.find(capability);
  if (image == images_.end()) image = images_.emplace(capability, compile_cuda(text_, capability)).first;
  Module module = nullptr;
  check_driver(driver().load(&module, image->second.data()), "cuModuleLoadData", text_.name, device);
  Function function = nullptr;
  check_driver(driver().function(&function, module, text_.name.c_str()), "cuModuleGetFunction", text_.name,
               device);
  functions_.emplace(device, function);
  return function;
}

void CudaKernel::launch_pointers(int device, unsigned blocks, unsigned threads, void** arguments) {
  if (blocks == 0) return;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  require_context(text_.name, device);
  launch_on_stream(text_.name, function_for(device), device, blocks, threads, arguments);
}

void CudaImage::load(int device) {
  const std::lock_guard lock(mutex_);
  if (modules_.contains(device)) return;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  require_context(name_, device);
  Module module = nullptr;
  check_driver(driver().load(&module, image_.data()), "cuModuleLoadData", name_, device);
  modules_.emplace(device, module);
}

void* CudaImage::function(int device, const std::string& name) {
  load(device);
  const std::lock_guard lock(mutex_);
  Function function = nullptr;
  check_driver(driver().function(&function, static_cast<Module>(modules_.at(device)), name.c_str()),
               "cuModuleGetFunction", name, device);
  return function;
}

void CudaImage::launch(void* function, int device, unsigned blocks, unsigned threads,
                       void** arguments) const {
  if (blocks == 0) return;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  require_context(name_, device);
  launch_on_stream(name_, function, device, blocks, threads, arguments);
}

int cuda_capability(int device) {
  const auto* properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
  return 10 * properties->major + properties->minor;
}

std::string cuda_compiler(int capability) {
  int major = 0, minor = 0;
  check_nvrtc(nvrtc().version(&major, &minor), "nvrtcVersion", "any");
  return fmt::format("NVRTC {}.{} for {}.{}", major, minor, capability / 10, capability % 10);
}

int multiprocessors(int device) {
  return at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device))->multiProcessorCount;
}

}  // namespace penstock
