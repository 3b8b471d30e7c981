// Which LibTorch this is, at compile time and at run time. Version conditionals live in this folder and in the backend
// adaptors of comm/, nowhere else.
#pragma once

#include <torch/version.h>

#include <string>

#define PENSTOCK_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace penstock {

// "1.13.1", as compiled against.
std::string torch_version();

// The BLAS that matrix products run on, as LibTorch reports it, and the library file behind it when it can be told
// ("OpenBLAS 0.3.21 ..."), so that a reference BLAS is noticed.
std::string blas_description();

}  // namespace penstock
