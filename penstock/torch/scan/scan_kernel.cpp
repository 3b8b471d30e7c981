#include "penstock/torch/scan/scan_kernel.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/cuda_text.h"

namespace penstock::detail {
namespace {

constexpr const char* kScanReal = R"(
__device__ inline REAL growth(REAL x) { return EXPONENTIAL(x); }
)";

struct ElementNames {
  const char *element, *real, *exponential;
};
// The fast exponential is exact enough for results that are rounded to 16 bits.
ElementNames names_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return {"Float64", "double", "exp"};
    case at::kFloat:
      return {"Float32", "float", "expf"};
    case at::kBFloat16:
      return {"BFloat16", "float", "__expf"};
    case at::kHalf:
      return {"Float16", "float", "__expf"};
    default:
      throw TypeError(describe("state-space kernels: dtype", c10::toString(dtype),
                               "float64, float32, bfloat16 or float16"));
  }
}

}  // namespace

CudaKernel& scan_kernel(const char* name, std::initializer_list<const char*> texts, at::ScalarType dtype,
                        const KernelMacros& macros) {
  using Key = std::tuple<std::string_view, at::ScalarType, KernelMacros>;  // names are literals
  static std::mutex& mutex = *new std::mutex;
  static auto& kernels = *new std::map<Key, CudaKernel*>;
  const std::lock_guard lock(mutex);
  CudaKernel*& kernel = kernels[{name, dtype, macros}];
  if (kernel == nullptr) {
    const ElementNames names = names_of(dtype);
    std::string text = kScanReal;
    for (const char* part : texts) text += part;
    CudaMacros all{{"ELEMENT", names.element}, {"REAL", names.real}, {"EXPONENTIAL", names.exponential}};
    for (const auto& [macro, value] : macros) all.emplace_back(macro, std::to_string(value));
    kernel = &text_kernel(name, {text.c_str()}, all);
  }
  return *kernel;
}

unsigned blocks_of(std::int64_t all, std::int64_t threads) {
  const std::int64_t blocks = (all + threads - 1) / threads;
  if (blocks > std::numeric_limits<int>::max())
    throw ValueError(describe("state-space kernels: elements", fmt::format("{}", all),
                              "at most 2^31 blocks of threads", "use a smaller batch"));
  return static_cast<unsigned>(blocks);
}

}  // namespace penstock::detail
