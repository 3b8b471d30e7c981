// Replaces random_cuda.cpp in builds without CUDA.
#include "penstock/errors.h"
#include "penstock/torch/random/random_job.h"

namespace penstock::random {

void run_on_cuda(const RandomJob&, int) {
  throw ConfigError(
      "random numbers on a CUDA tensor: this build has no CUDA kernels; build against a LibTorch with CUDA");
}

}  // namespace penstock::random
