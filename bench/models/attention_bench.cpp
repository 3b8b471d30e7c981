// Attention with a window compared with full causal attention, both through attend(), by length: milliseconds
// per call, forward alone and forward with backward, and their ratio within one round. On the CPU this is CPU
// time of all threads (OMP_NUM_THREADS), so that other load does not affect it; on a GPU it is elapsed time.
//
//   attention_bench [cpu|cuda] [window] [longest length]
//
// Defaults: the GPU if there is one, a window of 512, up to 8192 tokens. bfloat16 and 16 heads of 64 on a
// GPU, float32 and 2 heads of 64 on the CPU. "documents": the same window within documents of about 500
// tokens.
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "penstock/torch/kernels/fused_attention.h"
#include "penstock/torch/kernels/window_attention.h"

namespace {

using namespace penstock;
using bench::median;

struct Setting {
  at::Device device;
  std::int64_t heads, key_heads, width, window;
  at::ScalarType dtype;
  int rounds;
  std::int64_t batch;
  int calls;  // in a row; a GPU is waited for after the last

  double now_ms() const {
    if (!device.is_cuda()) return static_cast<double>(std::clock()) * 1000 / CLOCKS_PER_SEC;
    torch::cuda::synchronize();
    return std::chrono::duration<double, std::milli>(bench::Clock::now().time_since_epoch()).count();
  }
};

struct Rows {
  at::Tensor q, k, v, documents;

  Rows(const Setting& how, std::int64_t length) {
    // Heads inside, as a projection gives them.
    const auto random = [&](std::int64_t heads) {
      return at::randn({how.batch, length, heads, how.width}, at::TensorOptions(how.device).dtype(how.dtype))
          .transpose(1, 2)
          .requires_grad_();
    };
    q = random(how.heads);
    k = random(how.key_heads);
    v = random(how.key_heads);
    documents = at::rand({how.batch, length}, at::TensorOptions(how.device))
                    .lt(0.002)
                    .to(at::kInt)
                    .cumsum(1, at::kInt);
  }
};

enum class Kind { Full, SameKernel, Window, Documents };

at::Tensor attend_as(Kind kind, const Setting& how, const Rows& rows) {
  const std::int64_t length = rows.q.size(2);
  switch (kind) {
    case Kind::Full:
      return attend(rows.q, rows.k, rows.v, AttentionMask::causal(length, length), 0);
    case Kind::SameKernel:
      return attend_in_window(rows.q, rows.k, rows.v, length);
    case Kind::Window:
      return attend(rows.q, rows.k, rows.v, AttentionMask::causal(length, length), how.window);
    case Kind::Documents:
      return attend(rows.q, rows.k, rows.v, AttentionMask::within_documents(rows.documents), how.window);
  }
  return {};
}

// Milliseconds of one call. The mask is made in it, as in a model with a single layer.
double time_ms(const Setting& how, const Rows& rows, Kind kind, bool backward) {
  const double start = how.now_ms();
  for (int call = 0; call < how.calls; ++call) {
    if (backward) {
      const at::Tensor y = attend_as(kind, how, rows);
      torch::autograd::grad({y}, {rows.q, rows.k, rows.v}, {at::ones_like(y)});
    } else {
      const torch::NoGradGuard no_grad;
      attend_as(kind, how, rows);
    }
  }
  return (how.now_ms() - start) / how.calls;
}

void compare(const Setting& how, std::int64_t length, bool backward) {
  const Rows rows(how, length);
  // The kernel with windows, with a window of the whole row, where there is one.
  const bool kernel = has_window_kernel(rows.q, rows.k);
  std::vector<std::vector<double>> times(4);
  // On the CPU, full attention of long rows takes seconds.
  const int rounds = how.device.is_cuda() || length < 4096 ? how.rounds : 1;
  for (int round = 0; round <= rounds; ++round)
    for (const Kind kind : {Kind::Full, Kind::SameKernel, Kind::Window, Kind::Documents}) {
      if (kind == Kind::SameKernel && !kernel) continue;
      const double ms = time_ms(how, rows, kind, backward);
      if (round > 0) times[static_cast<std::size_t>(kind)].push_back(ms);  // the first calls allocate memory
    }
  const auto of = [&](Kind kind) { return median(times[static_cast<std::size_t>(kind)]); };
  const double full = of(Kind::Full), same = kernel ? of(Kind::SameKernel) : full, window = of(Kind::Window),
               documents = of(Kind::Documents);
  std::printf("%8lld %-20s %10.3f %12.3f %10.3f %8.2f %8.2f %12.3f %8.2f\n", static_cast<long long>(length),
              backward ? "forward, backward" : "forward", full, same, window, full / window, same / window,
              documents, full / documents);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const bool cuda = argc > 1 ? std::strcmp(argv[1], "cuda") == 0 : torch::cuda::is_available();
  const std::int64_t window = argc > 2 ? std::atoll(argv[2]) : 512,
                     longest = argc > 3 ? std::atoll(argv[3]) : 8192,
                     batch = argc > 4 ? std::atoll(argv[4])
                             : cuda   ? 4
                                      : 1;
  const Setting how = cuda
                          ? Setting{at::Device(at::kCUDA, 0), 16, 16, 64, window, at::kBFloat16, 10, batch, 8}
                          : Setting{at::Device(at::kCPU), 2, 1, 64, window, at::kFloat, 3, batch, 1};
  std::printf(
      "%s, %s, %lld rows, %lld heads of %lld, %lld key heads, window %lld; ms per call\n%8s %-20s %10s %12s "
      "%10s %8s %8s %12s %8s\n",
      cuda ? "CUDA" : "CPU", c10::toString(how.dtype), static_cast<long long>(batch),
      static_cast<long long>(how.heads), static_cast<long long>(how.width),
      static_cast<long long>(how.key_heads), static_cast<long long>(window), "tokens", "", "full",
      "same kernel", "window", "ratio", "ratio", "+ documents", "ratio");
  for (std::int64_t length = 1024; length <= longest; length *= 2)
    for (const bool backward : {false, true}) compare(how, length, backward);
}
