// Keyed random numbers compared with LibTorch's own generator: ns per element, and their ratio within short
// rounds of one run. On the CPU this is CPU time of all threads (OMP_NUM_THREADS), so that other load does
// not affect it; on CUDA it is elapsed time. Usage: random_bench [cpu|cuda] [elements]
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "penstock/random.h"

namespace {

using namespace penstock;
using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Bench {
  at::Device device;
  std::int64_t elements;

  double now() const {
    if (!device.is_cuda()) return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    torch::cuda::synchronize();
    return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  }
  double seconds(const std::function<void()>& work) const {
    const double start = now();
    work();
    return now() - start;
  }

  void compare(const std::string& name, const std::function<void()>& ours,
               const std::function<void()>& theirs) const {
    ours();  // the first call compiles kernels
    theirs();
    std::vector<double> own, other, ratios;
    for (int round = 0; round < 25; ++round) {
      own.push_back(seconds(ours) / static_cast<double>(elements) * 1e9);
      other.push_back(seconds(theirs) / static_cast<double>(elements) * 1e9);
      ratios.push_back(own.back() / other.back());
    }
    std::printf("%-28s %9.4f %9.4f %7.2f\n", name.c_str(), median(own), median(other), median(ratios));
    std::fflush(stdout);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const bool cuda = argc > 1 && std::strcmp(argv[1], "cuda") == 0;
  const Bench bench{at::Device(cuda ? at::kCUDA : at::kCPU, cuda ? 0 : -1),
                    argc > 2 ? std::atoll(argv[2]) : (cuda ? 1LL << 27 : 1LL << 21)};
  const RandomKey key{.seed = 42, .step = 7, .layer = 3};
  std::printf("%s, %lld elements, %d threads; ns per element\n%-28s %9s %9s %7s\n", cuda ? "CUDA" : "CPU",
              static_cast<long long>(bench.elements), at::get_num_threads(), "", "Penstock", "LibTorch",
              "ratio");
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const std::string suffix = dtype == at::kFloat ? ", float32" : ", bfloat16";
    const auto options = at::TensorOptions(bench.device).dtype(dtype);
    at::Tensor x = at::empty({bench.elements}, options);
    const at::Tensor input = at::ones({bench.elements}, options);
    bench.compare(
        "uniform" + suffix, [&] { keyed_uniform_(x, key, 0, 1); }, [&] { x.uniform_(0, 1); });
    bench.compare(
        "normal" + suffix, [&] { keyed_normal_(x, key, 0, 1); }, [&] { x.normal_(0, 1); });
    bench.compare(
        "bernoulli" + suffix, [&] { keyed_bernoulli_(x, key, 0.1); }, [&] { x.bernoulli_(0.1); });
    bench.compare(
        "dropout" + suffix, [&] { keyed_dropout(input, 0.1, key); }, [&] { at::dropout(input, 0.1, true); });
    at::Tensor leaf = input.clone().requires_grad_();
    const at::Tensor gradient = at::ones_like(input);
    bench.compare(
        "dropout and backward" + suffix,
        [&] { torch::autograd::grad({keyed_dropout(leaf, 0.1, key)}, {leaf}, {gradient}); },
        [&] { torch::autograd::grad({at::dropout(leaf, 0.1, true)}, {leaf}, {gradient}); });
    // A quarter of the columns of a matrix, like a tensor-parallel shard: its rows are short runs of the
    // global order.
    const std::int64_t columns = 1024, rows = bench.elements / (columns / 4);
    at::Tensor shard = at::empty({rows, columns / 4}, options);
    bench.compare(
        "normal, columns" + suffix,
        [&] {
          keyed_normal_(shard, key, 0, 1, {{rows, columns}, {0, columns / 4}});
        },
        [&] { shard.normal_(0, 1); });
  }
}
