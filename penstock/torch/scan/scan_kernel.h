// CUDA kernels of this folder: compiled at first use, once per element type and set of macros. Exists only in
// builds with CUDA. Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "penstock/torch/compat/cuda_kernel.h"

namespace penstock::detail {

// Macros with integer values.
using KernelMacros = std::vector<std::pair<const char*, std::int64_t>>;

// The texts, one after another, see ELEMENT with number() and put(), REAL, power() (the exponential
// function), i64, and the macros. Looking up a kernel that exists builds no text. Never destroyed: the driver
// may shut down before static objects are destroyed.
CudaKernel& scan_kernel(const char* name, std::initializer_list<const char*> texts, at::ScalarType dtype,
                        const KernelMacros& macros);

// Returns the largest number of elements, a power of two up to `most`, that divides `run` and to which all
// tensors are aligned.
std::int64_t scan_pack(std::int64_t run, std::int64_t most, std::initializer_list<at::Tensor> tensors);

// Blocks of `threads` for so many threads in all.
unsigned blocks_of(std::int64_t all, std::int64_t threads);

// Null for an undefined tensor.
inline const void* from(const at::Tensor& tensor) { return tensor.defined() ? tensor.data_ptr() : nullptr; }
inline void* to(const at::Tensor& tensor) { return tensor.data_ptr(); }

}  // namespace penstock::detail
