// Random jobs on CUDA: one kernel per kind of draw and dtype, compiled from random_kernel.h at first use.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/cuda_kernel.h"
#include "penstock/torch/random/random_job.h"
#include "penstock/torch/random/random_text.h"

namespace penstock::random {

namespace {

constexpr unsigned kThreads = 256;
constexpr i64 kBlocksPerMultiprocessor = 16;  // above that, a thread processes several Philox blocks in turn

constexpr const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::Uniform:
      return "Uniform";
    case Kind::Normal:
      return "Normal";
    case Kind::TruncNormal:
      return "TruncNormal";
    case Kind::Bernoulli:
      return "Bernoulli";
    case Kind::Dropout:
      return "Dropout";
  }
  return "";
}

constexpr const char* name_of(float*) { return "float"; }
constexpr const char* name_of(double*) { return "double"; }
constexpr const char* name_of(bool*) { return "bool"; }
constexpr const char* name_of(u32*) { return "penstock::philox::u32"; }
constexpr const char* name_of(u64*) { return "penstock::philox::u64"; }
constexpr const char* name_of(BFloat16Bits*) { return "penstock::random::BFloat16Bits"; }
constexpr const char* name_of(Float16Bits*) { return "penstock::random::Float16Bits"; }

template <Kind kind, class Real, class Word, class Element>
CudaKernel& kernel_for() {
  // Never destroyed: the driver may shut down before static objects are destroyed.
  static CudaKernel* const kernel = new CudaKernel({
      .name = "penstock_random",
      .text = "#include \"penstock/torch/random/random_kernel.h\"\n",
      .headers = {{"penstock/base/philox.h", kPhiloxText},
                  {"penstock/torch/random/random_math.h", kRandomMathText},
                  {"penstock/torch/random/random_kernel.h", kRandomKernelText}},
      .macros = {{"PENSTOCK_RANDOM_KIND", name_of(kind)},
                 {"PENSTOCK_RANDOM_REAL", name_of(static_cast<Real*>(nullptr))},
                 {"PENSTOCK_RANDOM_WORD", name_of(static_cast<Word*>(nullptr))},
                 {"PENSTOCK_RANDOM_ELEMENT", name_of(static_cast<Element*>(nullptr))}},
  });
  return *kernel;
}

}  // namespace

void run_on_cuda(const RandomJob& job, int device) {
  if (job.walk.rows == 0) return;
  const i64 blocks = (job.walk.rows * job.walk.blocks_per_row + kThreads - 1) / kThreads;
  const auto grid =
      static_cast<unsigned>(std::min<i64>(blocks, multiprocessors(device) * kBlocksPerMultiprocessor));
  bool launched = false;
  with_types(job, [&]<Kind kind, class Real, class Word, class Element>() {
    kernel_for<kind, Real, Word, Element>().launch(
        device, grid, kThreads, job.walk, job.stream, std::get<Constants<Real, Word>>(job.constants),
        static_cast<Element*>(job.out), static_cast<const Element*>(job.in));
    launched = true;
  });
  PENSTOCK_INVARIANT(launched, "no kernel computes this kind of random value in this dtype");
}

}  // namespace penstock::random
