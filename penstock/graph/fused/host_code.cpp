#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/fused/generated_code.h"

namespace penstock::graph {
namespace {

constexpr std::int64_t kWorkOfAThread = 32768;  // additions, as LibTorch's pointwise operators

class HostCall final : public KernelCall {
 public:
  HostCall(const LoopKernel& kernel, KernelFunction* function, std::shared_ptr<const LoadedCode> code)
      : function_(function), code_(std::move(code)), range_(kernel.range()) {
    const std::int64_t work = kernel.elements_per_unit() * std::max(1, kernel.cost_per_element() / 4);
    grain_ = std::max<std::int64_t>(1, kWorkOfAThread / std::max<std::int64_t>(1, work));
  }

  void run(std::span<void* const> buffers) const override {
    if (range_ <= grain_)
      function_(buffers.data(), 0, range_);
    else
      at::parallel_for(0, range_, grain_,
                       [&](std::int64_t first, std::int64_t end) { function_(buffers.data(), first, end); });
  }

 private:
  KernelFunction* function_;
  std::shared_ptr<const LoadedCode> code_;
  std::int64_t range_ = 0, grain_ = 1;
};

class HostCode final : public GeneratedCode {
 public:
  explicit HostCode(std::shared_ptr<const LoadedCode> code) : code_(std::move(code)) {}

  std::unique_ptr<const KernelCall> call(const LoopKernel& kernel,
                                         const std::string& function) const override {
    KernelFunction* found = code_->function(function);
    if (!found) throw StateError(fmt::format("generated code has no function {}", function));
    return std::make_unique<const HostCall>(kernel, found, code_);
  }

 private:
  std::shared_ptr<const LoadedCode> code_;
};

class HostTarget final : public CodeTarget {
 public:
  std::string identity() const override {
    if (!compiler_.works()) throw StateError(compiler_.problem);
    return compiler_.identity;
  }
  std::string compiler() const override { return compiler_.path; }
  std::string emit(const std::vector<NamedKernel>& kernels) const override { return emit_cpp(kernels); }
  std::string emit_function(const NamedKernel& kernel) const override { return graph::emit_function(kernel); }
  std::vector<ObjectCode> compile(const std::vector<std::string>& sources) const override {
    return compile_sources(compiler_, sources);
  }
  std::shared_ptr<const GeneratedCode> load(std::span<const std::uint8_t> bytes) const override {
    return std::make_shared<const HostCode>(LoadedCode::load(bytes));
  }
  bool may_share_memory(const LoopKernel& kernel, std::size_t read, std::size_t written) const override {
    return graph::may_share_memory(kernel, read, written);
  }

 private:
  const HostCompiler compiler_ = host_compiler();
};

}  // namespace

std::unique_ptr<const CodeTarget> code_target(c10::Device device) {
  if (device.is_cpu()) return std::make_unique<const HostTarget>();
  if (device.is_cuda()) return cuda_code_target(device);
  throw StateError(fmt::format("no code can be generated for the device {}", device.str()));
}

std::string code_targets_version() {
  return fmt::format("{}; {}; {}", kEmitterVersion, host_compiler().identity, cuda_code_version());
}

}  // namespace penstock::graph
