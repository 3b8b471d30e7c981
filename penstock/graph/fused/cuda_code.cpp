#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/codegen/emit_cuda.h"
#include "penstock/graph/fused/generated_code.h"
#include "penstock/torch/compat/cuda_kernel.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kMostCompilers = 8;  // threads

class CudaCall final : public KernelCall {
 public:
  CudaCall(const LoopKernel& kernel, const std::string& function, std::shared_ptr<CudaImage> image,
           int device)
      : image_(std::move(image)),
        device_(device),
        plan_(cuda_plan(kernel)),
        columns_(kernel.form == LoopForm::Columns ? kernel.sizes.back() : 0),
        function_(image_->function(device, function)) {
    if (columns_ == 0) {
      blocks_ = plan_.blocks;
    } else {
      splits_ = plan_.splits(multiprocessors(device));
      rows_of_split_ = (plan_.rows + splits_ - 1) / splits_;
      splits_ = (plan_.rows + rows_of_split_ - 1) / rows_of_split_;
      blocks_ = plan_.blocks * splits_;
      if (splits_ > 1) end_ = image_->function(device, function + "_end");
    }
    if (blocks_ > std::numeric_limits<std::int32_t>::max())
      throw StateError("a generated kernel has more blocks than a GPU can launch");
    for (std::size_t i = 0; i < kernel.buffers.size(); ++i)
      if (kernel.buffers[i].written) written_.push_back(i);
  }

  void run(std::span<void* const> buffers) const override {
    int aligned = 1;
    for (const void* buffer : buffers)
      if (reinterpret_cast<std::uintptr_t>(buffer) % plan_.alignment != 0) aligned = 0;
    c10::SmallVector<const void*, 36> arguments;
    for (void* const& buffer : buffers) arguments.push_back(&buffer);
    arguments.push_back(&aligned);
    if (columns_ == 0) {
      launch(function_, blocks_, plan_.threads, arguments);
      return;
    }
    // Freed memory is used again in the order of the stream.
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    c10::DataPtr partial;
    if (const std::size_t bytes = plan_.workspace_bytes(splits_, columns_); bytes > 0)
      partial = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
    void* const sums = partial.get();
    const auto rows_of_split = static_cast<long long>(rows_of_split_);
    arguments.push_back(&rows_of_split);
    arguments.push_back(&sums);
    launch(function_, blocks_, plan_.threads, arguments);
    if (splits_ == 1) return;
    const int splits = static_cast<int>(splits_);
    c10::SmallVector<const void*, 36> of_end{&sums, &splits};
    for (const std::size_t i : written_) of_end.push_back(&buffers[i]);
    constexpr unsigned kThreads = 256;
    launch(end_, (columns_ + kThreads - 1) / kThreads, kThreads, of_end);
  }

  void wait() const override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    at::cuda::getCurrentCUDAStream().synchronize();
  }

 private:
  void launch(void* function, std::int64_t blocks, unsigned threads,
              c10::SmallVectorImpl<const void*>& arguments) const {
    image_->launch(function, device_, static_cast<unsigned>(blocks), threads,
                   const_cast<void**>(arguments.data()));
  }

  std::shared_ptr<CudaImage> image_;
  const int device_;
  const CudaPlan plan_;
  const std::int64_t columns_;
  void* function_ = nullptr;
  void* end_ = nullptr;
  std::int64_t blocks_ = 0, splits_ = 1, rows_of_split_ = 0;
  std::vector<std::size_t> written_;
};

class CudaCode final : public GeneratedCode {
 public:
  CudaCode(std::shared_ptr<CudaImage> image, int device) : image_(std::move(image)), device_(device) {}
  std::unique_ptr<const KernelCall> call(const LoopKernel& kernel,
                                         const std::string& function) const override {
    return std::make_unique<const CudaCall>(kernel, function, image_, device_);
  }

 private:
  std::shared_ptr<CudaImage> image_;
  const int device_;
};

class CudaTarget final : public CodeTarget {
 public:
  explicit CudaTarget(int device) : device_(device) {}

  std::string identity() const override {
    return fmt::format("cuda:{}, {}", device_, cuda_compiler(cuda_capability(device_)));
  }
  std::string compiler() const override { return "NVRTC"; }
  std::string emit(const std::vector<NamedKernel>& kernels) const override { return emit_cuda(kernels); }
  std::string emit_function(const NamedKernel& kernel) const override { return emit_cuda_function(kernel); }

  std::vector<ObjectCode> compile(const std::vector<std::string>& sources) const override {
    const int capability = cuda_capability(device_);
    std::vector<ObjectCode> objects(sources.size());
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
      for (std::size_t i = next++; i < sources.size(); i = next++) try {
          const std::string image = compile_cuda({.name = "fused", .text = sources[i]}, capability);
          objects[i].bytes.assign(image.begin(), image.end());
        } catch (const std::exception& error) {
          objects[i].problem = error.what();
        }
    };
    std::vector<std::thread> threads;
    const std::size_t more =
        std::min({sources.size(), kMostCompilers,
                  static_cast<std::size_t>(std::max(1u, std::thread::hardware_concurrency()))});
    for (std::size_t t = 1; t < more; ++t) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    return objects;
  }

  std::shared_ptr<const GeneratedCode> load(std::span<const std::uint8_t> bytes) const override {
    auto image = std::make_shared<CudaImage>("fused", std::string(bytes.begin(), bytes.end()));
    image->load(device_);
    return std::make_shared<const CudaCode>(std::move(image), device_);
  }
  bool may_share_memory(const LoopKernel& kernel, std::size_t read, std::size_t written) const override {
    return may_share_memory_on_cuda(kernel, read, written);
  }

 private:
  const int device_;
};

}  // namespace

std::unique_ptr<const CodeTarget> cuda_code_target(c10::Device device) {
  return std::make_unique<const CudaTarget>(device.index());
}

std::string cuda_code_version() {
  std::string version = fmt::format("CUDA {}", kCudaEmitterVersion);
  if (!at::cuda::is_available()) return version;
  for (int device = 0; device < static_cast<int>(at::cuda::device_count()); ++device)
    version += ", " + cuda_compiler(cuda_capability(device));
  return version;
}

}  // namespace penstock::graph
