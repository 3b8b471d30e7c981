#pragma once

namespace penstock::cli {

// For commands that compute in their own process instead of starting ranks: uses as many threads as this
// process may use cores. LibTorch counts the machine's cores, which oversubscribes the CPU in a container
// with few cores. OMP_NUM_THREADS and MKL_NUM_THREADS take precedence.
void use_available_cores();

}  // namespace penstock::cli
