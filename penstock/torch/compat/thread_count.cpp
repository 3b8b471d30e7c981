#include "penstock/torch/compat/thread_count.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace penstock {

namespace {

// Null if the process uses another BLAS.
template <class Function>
Function openblas(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
}

}  // namespace

ThreadCounts thread_counts() {
  const auto of_blas = openblas<int (*)()>("openblas_get_num_threads");
  const int operators = at::get_num_threads();
  return {operators, of_blas == nullptr ? operators : of_blas()};
}

void set_thread_counts(const ThreadCounts& counts) {
  if (const auto set_blas = openblas<void (*)(int)>("openblas_set_num_threads")) set_blas(counts.blas);
  // Must be last: OpenBLAS's OpenMP build sets OpenMP's thread count, which LibTorch uses too.
  at::set_num_threads(counts.operators);
}

}  // namespace penstock
