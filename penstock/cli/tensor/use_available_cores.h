#pragma once

namespace penstock::cli {

// For commands that compute in their own process instead of starting ranks: as many threads as this process may use cores. LibTorch
// itself counts the machine's cores, which in a container with two of them means dozens of threads that stop each other.
// OMP_NUM_THREADS and MKL_NUM_THREADS keep the last word.
void use_available_cores();

}  // namespace penstock::cli
