#include "penstock/cli/tensor/use_available_cores.h"

#include <cstdlib>

#include "penstock/comm/launch/launch_cores.h"
#include "penstock/torch/compat/thread_count.h"

namespace penstock::cli {

void use_available_cores() {
  for (const char* name : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"})
    if (std::getenv(name) != nullptr) return;
  const int cores = comm::available_cores();
  set_thread_counts({cores, cores});
}

}  // namespace penstock::cli
