// The LibTorch version, at compile time and at run time. Version conditionals are allowed only in this folder
// and in the backend adaptors of comm/.
#pragma once

#include <torch/version.h>

#include <string>

#define PENSTOCK_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace penstock {

// For example "1.13.1": the version compiled against.
std::string torch_version();

// Describes the BLAS used for matrix products, as LibTorch reports it, with its library file if it can be
// determined ("OpenBLAS 0.3.21 ..."), so that a slow reference BLAS is noticed.
std::string blas_description();

}  // namespace penstock
