// What the CUDA texts of this folder share: element types, and a cache of kernels by name and macros. Only in
// builds with CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/torch/compat/cuda_kernel.h"

namespace penstock::detail {

// Source text: ELEMENT (a macro) in memory, Number in registers, `number` and `put` convert between them.
extern const char* const kExpertElements;

// The name of a dtype in that text. Throws NotImplemented for others than float32, float64, bfloat16 and
// float16.
const char* expert_element(at::ScalarType dtype);

using Macros = std::vector<std::pair<std::string, std::string>>;

// Returns the kernel `name` of kExpertElements followed by `text`, compiled with these macros. Kernels are
// never destroyed: the driver may shut down before static objects are destroyed.
CudaKernel& expert_kernel(const char* name, const char* text, const Macros& macros);

// Arguments of kernels: pointers and 64-bit numbers, as the texts declare them.
inline const void* device_in(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}
inline void* device_out(const at::Tensor& tensor) { return tensor.data_ptr(); }
inline long long device_number(std::int64_t value) { return value; }

// Whether rows of `width` elements can be read 16 bytes at a time.
bool has_wide_rows(const at::Tensor& tensor, std::int64_t width);

}  // namespace penstock::detail
