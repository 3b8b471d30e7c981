#include "penstock/torch/scan/scan_kernel.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::detail {
namespace {

constexpr const char* kScanElements = R"(
typedef long long i64;
struct Float64 { double bits; };
struct Float32 { float bits; };
struct BFloat16 { unsigned short bits; };
struct Float16 { unsigned short bits; };

__device__ inline double number(Float64 x) { return x.bits; }
__device__ inline float number(Float32 x) { return x.bits; }
__device__ inline float number(BFloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float number(Float16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}
__device__ inline void put(Float64& to, double x) { to.bits = x; }
__device__ inline void put(Float32& to, float x) { to.bits = x; }
__device__ inline void put(BFloat16& to, float x) {  // round to nearest even; NaN stays NaN
  const unsigned bits = __float_as_uint(x);
  to.bits = x != x ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ inline void put(Float16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

__device__ inline REAL power(REAL x) { return EXPONENTIAL(x); }

struct alignas(sizeof(ELEMENT) * PACK) Pack { ELEMENT at[PACK]; };
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
  static auto& kernels = *new std::map<Key, std::unique_ptr<CudaKernel>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<CudaKernel>& kernel = kernels[{name, dtype, macros}];
  if (!kernel) {
    const ElementNames names = names_of(dtype);
    CudaSource source{
        .name = name,
        .text = kScanElements,
        .headers = {},
        .macros = {{"ELEMENT", names.element}, {"REAL", names.real}, {"EXPONENTIAL", names.exponential}}};
    for (const char* text : texts) source.text += text;
    for (const auto& [macro, value] : macros) source.macros.emplace_back(macro, std::to_string(value));
    kernel = std::make_unique<CudaKernel>(std::move(source));
  }
  return *kernel;
}

std::int64_t scan_pack(std::int64_t run, std::int64_t most, std::initializer_list<at::Tensor> tensors) {
  std::int64_t pack = most;
  for (; pack > 1; pack /= 2) {
    bool fits = run % pack == 0;
    for (const at::Tensor& tensor : tensors)
      fits = fits && reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) %
                             static_cast<std::uintptr_t>(pack * tensor.element_size()) ==
                         0;
    if (fits) break;
  }
  return pack;
}

unsigned blocks_of(std::int64_t all, std::int64_t threads) {
  const std::int64_t blocks = (all + threads - 1) / threads;
  if (blocks > std::numeric_limits<int>::max())
    throw ValueError(describe("state-space kernels: elements", fmt::format("{}", all),
                              "at most 2^31 blocks of threads", "use a smaller batch"));
  return static_cast<unsigned>(blocks);
}

}  // namespace penstock::detail
