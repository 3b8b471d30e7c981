// CUDA kernels of this folder: compiled at first use, once per element type and set of macros. Exists only in
// builds with CUDA. Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "penstock/torch/compat/cuda_text.h"

namespace penstock::detail {

// Macros with integer values.
using KernelMacros = std::vector<std::pair<const char*, std::int64_t>>;

// The texts, one after another, see what cuda_text.h describes, REAL, growth() (the exponential
// function), and the macros. Looking up a kernel that exists builds no text. Never destroyed: the driver
// may shut down before static objects are destroyed.
CudaKernel& scan_kernel(const char* name, std::initializer_list<const char*> texts, at::ScalarType dtype,
                        const KernelMacros& macros);

// Blocks of `threads` for so many threads in all.
unsigned blocks_of(std::int64_t all, std::int64_t threads);

}  // namespace penstock::detail
