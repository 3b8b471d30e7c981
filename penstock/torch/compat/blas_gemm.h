// The routine of BLAS that LibTorch's products of matrices on the CPU call, without the operators around it.
//
// Offered only where LibTorch calls it for every product and does nothing else: versions whose sources are
// known to do so, built without MKL, linked with a BLAS that the process can look up, and at full precision.
// Before the first use, products by it are compared with LibTorch's, bit by bit.
// Thread safety: any thread.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace penstock {

// A product of matrices in column-major order: C = op(A) op(B) + beta C, where op(A) is m x k, op(B) k x n.
struct BlasGemm {
  bool transpose_a = false, transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
};

// Whether products of this dtype may be made by blas_gemm now.
bool has_blas_gemm(at::ScalarType dtype);

// Adjusts the strides of dims of size 1 as LibTorch does. Returns false for sizes that BLAS cannot take, for
// which LibTorch has a kernel of its own.
bool prepare_blas_gemm(BlasGemm& product);

// Memory of `dtype`, for which has_blas_gemm holds; `product` was prepared. `c` is read only if `add`: beta
// is 1 then, otherwise 0.
void blas_gemm(at::ScalarType dtype, const BlasGemm& product, const void* a, const void* b, void* c,
               bool add);

}  // namespace penstock
