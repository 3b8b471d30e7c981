// What the texts of CUDA kernels share: element types, a cache of compiled kernels, and their arguments. Only
// in builds with CUDA.
//
//   text_kernel("scale", {kScale}, {{"ELEMENT", cuda_element(x.scalar_type())}, {"PACK",
//   std::to_string(pack)}})
//       .launch(device, blocks, threads, device_in(x), device_out(y), device_number(x.numel() / pack));
//
// A text sees i64, INFINITY and NAN; the types Float32, Float64, BFloat16 and Float16 of elements in memory,
// which number() reads and put() writes; power() and logarithm(), of float or double; and, if ELEMENT is
// defined, Number, the type in which its values are computed (double for Float64, otherwise float). If PACK
// is defined as well, Pack holds so many elements, aligned to be loaded at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "penstock/torch/compat/cuda_kernel.h"

namespace penstock {

// The type of this dtype's elements in a text. Throws NotImplemented for others than float32, float64,
// bfloat16 and float16.
const char* cuda_element(at::ScalarType dtype);

using CudaMacros = std::vector<std::pair<std::string, std::string>>;

// Returns the kernel `name` of these texts, one after another, compiled with these macros. Kernels are never
// destroyed: the driver may shut down before static objects are destroyed.
CudaKernel& text_kernel(const char* name, std::initializer_list<const char*> texts, const CudaMacros& macros);

// Returns the largest number of elements, a power of two up to `most`, that divides `run` and to which all
// tensors are aligned.
std::int64_t cuda_pack(std::int64_t run, std::int64_t most, std::initializer_list<at::Tensor> tensors);
// The same, up to sixteen bytes of the first tensor.
std::int64_t cuda_pack(std::int64_t run, std::initializer_list<at::Tensor> tensors);

// Returns the blocks for so much work, at most 16 for each multiprocessor: kernels loop over the rest.
unsigned looping_blocks(std::int64_t work, std::int64_t per_block, int device);

// Arguments of kernels: pointers, null for undefined tensors, and 64-bit numbers.
inline const void* device_in(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}
inline void* device_out(const at::Tensor& tensor) { return tensor.defined() ? tensor.data_ptr() : nullptr; }
inline long long device_number(std::int64_t value) { return value; }

}  // namespace penstock
