#include "penstock/torch/compat/cuda_text.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

constexpr std::int64_t kBlocksPerMultiprocessor = 16;

constexpr const char* kElementText = R"(
typedef long long i64;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
struct Float32 { float bits; };
struct Float64 { double bits; };
struct BFloat16 { unsigned short bits; };
struct Float16 { unsigned short bits; };

__device__ inline float number(Float32 x) { return x.bits; }
__device__ inline double number(Float64 x) { return x.bits; }
__device__ inline float number(BFloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float number(Float16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}
__device__ inline void put(Float32& to, float x) { to.bits = x; }
__device__ inline void put(Float64& to, double x) { to.bits = x; }
__device__ inline void put(BFloat16& to, float x) {  // round to nearest even; NaN stays NaN
  const unsigned bits = __float_as_uint(x);
  to.bits = x != x ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ inline void put(Float16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

__device__ inline float power(float x) { return expf(x); }
__device__ inline double power(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

#ifdef ELEMENT
template <class Element> struct NumberOf { typedef float Type; };
template <> struct NumberOf<Float64> { typedef double Type; };
typedef NumberOf<ELEMENT>::Type Number;
#ifdef PACK
struct alignas(sizeof(ELEMENT) * PACK) Pack { ELEMENT at[PACK]; };
#endif
#endif
)";

}  // namespace

const char* cuda_element(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "Float32";
    case at::kDouble:
      return "Float64";
    case at::kBFloat16:
      return "BFloat16";
    case at::kHalf:
      return "Float16";
    default:
      throw NotImplemented(
          describe("a kernel on a GPU", c10::toString(dtype), "float32, float64, bfloat16 or float16"));
  }
}

CudaKernel& text_kernel(const char* name, std::initializer_list<const char*> texts,
                        const CudaMacros& macros) {
  static std::mutex& mutex = *new std::mutex;
  static auto& kernels = *new std::map<std::pair<std::string, CudaMacros>, std::unique_ptr<CudaKernel>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<CudaKernel>& kernel = kernels[{name, macros}];
  if (!kernel) {
    CudaSource source{.name = name, .text = kElementText, .headers = {}, .macros = macros};
    for (const char* text : texts) source.text += text;
    kernel = std::make_unique<CudaKernel>(std::move(source));
  }
  return *kernel;
}

std::int64_t cuda_pack(std::int64_t run, std::int64_t most, std::initializer_list<at::Tensor> tensors) {
  for (std::int64_t pack = most; pack > 1; pack /= 2) {
    const auto aligned = [&](const at::Tensor& tensor) {
      return reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) %
                 static_cast<std::uintptr_t>(pack * tensor.element_size()) ==
             0;
    };
    if (run % pack == 0 && std::all_of(tensors.begin(), tensors.end(), aligned)) return pack;
  }
  return 1;
}

std::int64_t cuda_pack(std::int64_t run, std::initializer_list<at::Tensor> tensors) {
  return cuda_pack(run, 16 / tensors.begin()->element_size(), tensors);
}

unsigned looping_blocks(std::int64_t work, std::int64_t per_block, int device) {
  return static_cast<unsigned>(
      std::min((work + per_block - 1) / per_block, multiprocessors(device) * kBlocksPerMultiprocessor));
}

}  // namespace penstock
