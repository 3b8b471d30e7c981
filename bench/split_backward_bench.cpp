// The cost of splitting a backward into halves: transformer blocks of two widths, each method compared with
// one plain backward.
//
//   split_backward_bench                       8 blocks, 64 positions, widths 32 and 256
//   split_backward_bench --blocks 4 --rounds 21
//
// The methods alternate, one microbatch at a time; measures CPU time of this thread and shows the median over
// the rounds. The heap keeps its memory, as in a long training run; otherwise the result would depend on
// which method happens to return memory to the system. Set OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1: the BLAS
// reads them when it is loaded.
#include <fmt/format.h>
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "penstock/deferred_linear.h"
#include "penstock/pipeline/backward/split_backward.h"
#include "penstock/torch/compat/version.h"

namespace {

using namespace penstock;
using penstock::bench::median;

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads) : heads(heads) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", DeferredLinear(width, 3 * width));
    proj = register_module("proj", DeferredLinear(width, width));
    up = register_module("up", DeferredLinear(width, 4 * width));
    down = register_module("down", DeferredLinear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto B = x.size(0), T = x.size(1), C = x.size(2);
    const auto parts = qkv(norm1(x)).view({B, T, 3, heads, C / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const at::Tensor attention = at::softmax(
        at::matmul(parts[0], parts[1].transpose(-2, -1)) * (1 / std::sqrt(static_cast<double>(C / heads))),
        -1);
    const at::Tensor y = x + proj(at::matmul(attention, parts[2]).transpose(1, 2).reshape({B, T, C}));
    return y + down(at::gelu(up(norm2(y))));
  }
  std::int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  DeferredLinear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

struct Figures {
  std::vector<double> plain, first, second, deferred_first, deferred_second;
};

void measure(std::int64_t width, int blocks, int rounds) {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (int i = 0; i < blocks; ++i) model->push_back(Block(width, 4));
  const at::Tensor value = at::randn({1, 64, width}), grad = at::randn({1, 64, width});
  for (const at::Tensor& parameter : model->parameters())
    parameter.mutable_grad() = at::zeros_like(parameter);
  Figures figures;
  for (int round = -3; round < rounds; ++round) {
    const auto timed = [&](std::vector<double>& into, const auto& call) {
      const double begin = cpu_ms();
      call();
      if (round >= 0) into.push_back(cpu_ms() - begin);
    };
    const auto forward = [&](at::Tensor& x) {
      x = value.clone().requires_grad_(true);
      return OutputEdges::of({model->forward(x)});
    };
    at::Tensor x;
    {
      OutputEdges edges = forward(x);
      timed(figures.plain, [&] { stage_backward(std::move(edges), {grad}, {x}); });
    }
    {
      OutputEdges edges = forward(x);
      InputBackward half;
      timed(figures.first, [&] { half = stage_backward_input(std::move(edges), {grad}, {x}); });
      timed(figures.second, [&] { half.weights.run(); });
    }
    {
      WeightQueue queue;
      std::optional<WeightQueueGuard> guard(queue);
      OutputEdges edges = forward(x);
      guard.reset();
      timed(figures.deferred_first, [&] { stage_backward(std::move(edges), {grad}, {x}); });
      timed(figures.deferred_second, [&] { queue.run(); });
    }
  }
  const auto sum = [](std::vector<double> a, const std::vector<double>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return median(std::move(a));
  };
  const double plain = median(figures.plain), halves = sum(figures.first, figures.second),
               deferred = sum(figures.deferred_first, figures.deferred_second);
  fmt::print(
      "width {:4}  plain {:8.3f} ms   halves {:8.3f} + {:8.3f} ms  ratio {:.3f}   deferred {:8.3f} + {:8.3f} "
      "ms  ratio {:.3f}\n",
      width, plain, median(figures.first), median(figures.second), halves / plain,
      median(figures.deferred_first), median(figures.deferred_second), deferred / plain);
}

}  // namespace

int main(int argc, char** argv) {
  int blocks = 8, rounds = 41;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--blocks") == 0)
      blocks = std::stoi(argv[i + 1]);
    else if (std::strcmp(argv[i], "--rounds") == 0)
      rounds = std::stoi(argv[i + 1]);
    else
      return fmt::print(stderr, "split_backward_bench: unknown option {}; expected --blocks or --rounds\n",
                        argv[i]),
             2;
  }
  at::set_num_threads(1);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 1 << 28);
  fmt::print("LibTorch {}, {} blocks, 64 positions\n", penstock::torch_version(), blocks);
  for (const std::int64_t width : {32, 256}) measure(width, blocks, rounds);
}
