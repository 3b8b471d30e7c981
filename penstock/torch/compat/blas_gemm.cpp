#include "penstock/torch/compat/blas_gemm.h"

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

#include "penstock/torch/compat/version.h"

namespace penstock {
namespace {

// As LibTorch declares it.
template <class T>
using Routine = void (*)(char*, char*, int*, int*, int*, T*, const T*, int*, const T*, int*, T*, T*, int*);

template <class T>
Routine<T> find_routine(const char* name) {
  // The symbol that LibTorch is bound to, too, unless BLAS is inside of it; probe() tells.
  return reinterpret_cast<Routine<T>>(::dlsym(RTLD_DEFAULT, name));
}
template <class T>
Routine<T> routine();
template <>
Routine<float> routine<float>() {
  static const Routine<float> found = find_routine<float>("sgemm_");
  return found;
}
template <>
Routine<double> routine<double>() {
  static const Routine<double> found = find_routine<double>("dgemm_");
  return found;
}

template <class T>
void call(const BlasGemm& product, const void* a, const void* b, void* c, bool add) {
  char transpose_a = product.transpose_a ? 't' : 'n', transpose_b = product.transpose_b ? 't' : 'n';
  int m = static_cast<int>(product.m), n = static_cast<int>(product.n), k = static_cast<int>(product.k);
  int lda = static_cast<int>(product.lda), ldb = static_cast<int>(product.ldb),
      ldc = static_cast<int>(product.ldc);
  T alpha = 1, beta = add ? 1 : 0;
  routine<T>()(&transpose_a, &transpose_b, &m, &n, &k, &alpha, static_cast<const T*>(a), &lda,
               static_cast<const T*>(b), &ldb, &beta, static_cast<T*>(c), &ldc);
}

// From 2.9 on, products may be made by oneDNN at a precision that is set in several ways; on other processors
// by the Arm Compute Library.
#if defined(__x86_64__) && !PENSTOCK_TORCH_AT_LEAST(2, 9)
constexpr bool kKnownBuild = true;
#else
constexpr bool kKnownBuild = false;
#endif

bool at_full_precision() {
#if PENSTOCK_TORCH_AT_LEAST(2, 9)
  return false;
#else
  return at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST;
#endif
}

// Products of row-major matrices as LibTorch makes them: with the arguments exchanged.
template <class T>
bool probe() {
  if (!kKnownBuild || at::hasMKL() || !routine<T>()) return false;
  const auto dtype = c10::CppTypeToScalarType<T>::value;
  constexpr std::int64_t kSizes[][3] = {{5, 7, 9}, {33, 65, 17}, {64, 8, 64}, {128, 48, 96}, {3, 200, 1}};
  for (const auto& [rows, inner, columns] : kSizes) {
    const auto values = [&](std::int64_t count, double step) {
      return at::arange(count, at::kDouble).mul_(step).sin_().to(dtype);
    };
    const at::Tensor x = values(rows * inner, 0.7).view({rows, inner});
    const at::Tensor y = values(columns * inner, 1.3).view({columns, inner});
    const at::Tensor expected = at::mm(x, y.t());
    const at::Tensor actual = at::empty({rows, columns}, dtype);
    BlasGemm product{
        .transpose_a = true, .m = columns, .n = rows, .k = inner, .lda = inner, .ldb = inner, .ldc = columns};
    // One column is C in column-major order, and its arguments are not exchanged.
    const bool exchanged = columns > 1;
    if (!exchanged) {
      std::swap(product.m, product.n);
      product.ldc = rows;
    }
    if (!prepare_blas_gemm(product)) return false;
    call<T>(product, (exchanged ? y : x).data_ptr(), (exchanged ? x : y).data_ptr(), actual.data_ptr(),
            false);
    if (std::memcmp(actual.data_ptr(), expected.data_ptr(), static_cast<std::size_t>(actual.nbytes())) != 0)
      return false;
  }
  return true;
}

}  // namespace

bool has_blas_gemm(at::ScalarType dtype) {
  if (dtype == at::kFloat) {
    static const bool same = probe<float>();
    return same && at_full_precision();
  }
  if (dtype == at::kDouble) {
    static const bool same = probe<double>();
    return same;
  }
  return false;
}

bool prepare_blas_gemm(BlasGemm& product) {
  auto& [transpose_a, transpose_b, m, n, k, lda, ldb, ldc] = product;
  if (n == 1) ldc = m;
  if (transpose_a) {
    if (m == 1) lda = k;
  } else if (k == 1) {
    lda = m;
  }
  if (transpose_b) {
    if (k == 1) ldb = n;
  } else if (n == 1) {
    ldb = k;
  }
  const auto fits = [](std::int64_t value, std::int64_t least) {
    return value <= INT_MAX && value >= std::max<std::int64_t>(1, least);
  };
  return fits(m, 1) && fits(n, 1) && fits(k, 1) && fits(lda, transpose_a ? k : m) &&
         fits(ldb, transpose_b ? n : k) && fits(ldc, m);
}

void blas_gemm(at::ScalarType dtype, const BlasGemm& product, const void* a, const void* b, void* c,
               bool add) {
  if (dtype == at::kFloat)
    call<float>(product, a, b, c, add);
  else
    call<double>(product, a, b, c, add);
}

}  // namespace penstock
