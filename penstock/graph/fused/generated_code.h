// Where generated kernels come from, and how they are called: C++ of the host's compiler for the CPU, CUDA of
// NVRTC for a GPU.
//
//   const auto target = code_target(device);
//   const std::string source = target->emit({{"k0", kernel}});
//   const auto code = target->load(target->compile({source})[0].bytes);
//   code->call(kernel, "k0")->run(buffers);
//
// Private to this folder. Thread safety: any thread, also of one object.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "penstock/graph/codegen/emit_cpp.h"
#include "penstock/graph/codegen/host_compiler.h"
#include "penstock/graph/codegen/loop_kernel.h"

namespace penstock::graph {

// A compiled function of a kernel.
class KernelCall {
 public:
  virtual ~KernelCall() = default;
  // `buffers`: the addresses, in the order of the kernel. On a GPU the work is queued on the current stream.
  virtual void run(std::span<void* const> buffers) const = 0;
  // Waits for queued work.
  virtual void wait() const {}
};

class GeneratedCode {
 public:
  virtual ~GeneratedCode() = default;
  // Keeps the code. Throws StateError if there is no such function.
  virtual std::unique_ptr<const KernelCall> call(const LoopKernel& kernel,
                                                 const std::string& function) const = 0;
};

class CodeTarget {
 public:
  virtual ~CodeTarget() = default;
  // Compiler, its version and flags, and the processor: equal text, equal code. Throws StateError, saying
  // why, if code cannot be made.
  virtual std::string identity() const = 0;
  // The compiler's name, for messages.
  virtual std::string compiler() const = 0;
  virtual std::string emit(const std::vector<NamedKernel>& kernels) const = 0;
  virtual std::string emit_function(const NamedKernel& kernel) const = 0;
  virtual std::vector<ObjectCode> compile(const std::vector<std::string>& sources) const = 0;
  // Throws StateError.
  virtual std::shared_ptr<const GeneratedCode> load(std::span<const std::uint8_t> bytes) const = 0;
  // Whether the written buffer of a kernel may have the memory of the read one.
  virtual bool may_share_memory(const LoopKernel& kernel, std::size_t read, std::size_t written) const = 0;
};

// Throws StateError for a device that kernels cannot be generated for.
std::unique_ptr<const CodeTarget> code_target(c10::Device device);
// Of a CUDA device; in cuda_code.cpp, or in cuda_code_absent.cpp.
std::unique_ptr<const CodeTarget> cuda_code_target(c10::Device device);
// What the generators of this process depend on, whether they are used or not: part of keys of compiled code.
std::string code_targets_version();
std::string cuda_code_version();

}  // namespace penstock::graph
