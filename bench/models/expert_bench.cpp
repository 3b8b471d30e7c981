// The expert block beside a dense SwiGLU layer with the same operations per token, and beside loops over the
// experts: times of one run and their ratios. On the CPU with one thread (OMP_NUM_THREADS=1
// OPENBLAS_NUM_THREADS=1), pinned to one core, in CPU time, so that other load affects it little.
//
//   loop with masks    every expert computes all tokens, its weight is zero for those of others
//   loop with indices  every expert computes its own tokens, found with nonzero()
//
// Usage: expert_bench [cpu|cuda] [tokens] [width] [expert width] [experts] [top_k]
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/figures.h"
#include "penstock/models/blocks/experts.h"
#include "penstock/models/blocks/feed_forward.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/experts/grouped_product.h"
#include "penstock/torch/kernels/fused_math.h"

namespace {

using namespace penstock;

struct Bench {
  static constexpr int kCalls = 8;
  at::Device device;
  models::ExpertOptions options;
  std::int64_t tokens;
  int rounds;

  double ms(const std::function<void()>& work) const {
    if (!device.is_cuda()) {
      const std::clock_t used = std::clock();
      work();
      return 1e3 * static_cast<double>(std::clock() - used) / CLOCKS_PER_SEC;
    }
    // Several in a row, as the layers of a model: the host runs ahead of the device.
    torch::cuda::synchronize();
    const auto begin = bench::Clock::now();
    for (int call = 0; call < kCalls; ++call) work();
    torch::cuda::synchronize();
    return bench::ms_since(begin) / kCalls;
  }
  // Alternates between both, so that other load affects them alike; prints medians and the ratio of a to b.
  void compare(const char* name, const std::function<void()>& a, const std::function<void()>& b) const {
    for (const auto& work : {a, b}) ms(work);
    std::vector<double> times_a, times_b, ratios;
    for (int round = 0; round < rounds; ++round) {
      times_a.push_back(ms(a));
      times_b.push_back(ms(b));
      ratios.push_back(times_a.back() / times_b.back());
    }
    std::printf("%-52s %10.2f %10.2f %7.2f\n", name, bench::median(times_a), bench::median(times_b),
                bench::median(ratios));
    std::fflush(stdout);
  }
};

// What backward begins with: the hidden states, and the losses if there are any. Their gradients are made
// beforehand.
std::vector<at::Tensor> results_of(const models::BlockResult& result) {
  return {result.hidden, result.losses[0].value, result.losses[1].value};
}

// Router and losses as in the block.
struct Route {
  at::Tensor choices, weights;
};
Route route(const models::Experts& experts, const at::Tensor& x) {
  const at::Tensor scores = at::softmax(at::linear(x, experts->router->weight), -1);
  auto [weights, choices] = scores.topk(experts->options().top_k, -1);
  return {choices, weights / weights.sum(-1, true)};
}
at::Tensor expert(const models::Experts& experts, std::int64_t index, const at::Tensor& x) {
  return (at::silu(x.mm(experts->gate[index])) * x.mm(experts->up[index])).mm(experts->down[index]);
}
at::Tensor masked_loop(const models::Experts& experts, const at::Tensor& x) {
  const auto [choices, weights] = route(experts, x);
  at::Tensor y = at::zeros_like(x);
  for (std::int64_t e = 0; e < experts->options().experts; ++e)
    y = y + expert(experts, e, x) * (weights * (choices == e)).sum(-1, true);
  return y;
}
at::Tensor indexed_loop(const models::Experts& experts, const at::Tensor& x) {
  const auto [choices, weights] = route(experts, x);
  at::Tensor y = at::zeros_like(x);
  for (std::int64_t e = 0; e < experts->options().experts; ++e) {
    const at::Tensor found = (choices == e).nonzero(), rows = found.select(1, 0);
    y = y.index_add(
        0, rows,
        expert(experts, e, x.index_select(0, rows)) * weights.index({rows, found.select(1, 1)}).unsqueeze(1));
  }
  return y;
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int index, std::int64_t fallback) {
    return argc > index ? std::atoll(argv[index]) : fallback;
  };
  const bool cuda = argc > 1 && std::string(argv[1]) == "cuda";
  Bench bench{cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU),
              {.width = argument(3, cuda ? 1024 : 512),
               .experts = argument(5, 64),
               .top_k = argument(6, 2),
               .expert_width = argument(4, cuda ? 512 : 256)},
              argument(2, cuda ? 32 * 1024 : 8192),
              cuda ? 20 : 7};
  if (!cuda) bench::pin(0);
  const models::ExpertOptions& options = bench.options;
  const std::int64_t dense_width = options.top_k * options.expert_width;
  torch::manual_seed(1);
  models::Experts experts(options);
  models::FeedForward dense(options.width, dense_width);
  experts->to(bench.device);
  dense->to(bench.device);
  const at::Tensor x = torch::randn({1, bench.tokens, options.width}, bench.device), flat = x[0];
  const at::Tensor leaf = x.clone().set_requires_grad(true);
  std::printf(
      "%s, %d threads, %lld tokens of width %lld; %lld experts of width %lld, %lld per token (%.2f MFLOP per "
      "token forward); dense layer of width %lld (%.2f MFLOP)\n%-52s %10s %10s %7s\n",
      cuda ? "CUDA, bfloat16" : "CPU, float32", at::get_num_threads(), static_cast<long long>(bench.tokens),
      static_cast<long long>(options.width), static_cast<long long>(options.experts),
      static_cast<long long>(options.expert_width), static_cast<long long>(options.top_k),
      models::flops_per_token(options) / 1e6, static_cast<long long>(dense_width),
      6e-6 * static_cast<double>(options.width * dense_width), "ms", "experts", "other", "ratio");

  const std::optional<at::ScalarType> autocast = cuda ? std::optional(at::kBFloat16) : std::nullopt;
  const auto forward = [&](const std::function<void()>& work) {
    return [&, work] {
      const at::NoGradGuard no_grad;
      const AutocastScope casts(bench.device.type(), autocast);
      work();
    };
  };
  const auto training = [&](torch::nn::Module& module, const std::function<std::vector<at::Tensor>()>& run) {
    std::vector<at::Tensor> gradients;
    {
      const AutocastScope casts(bench.device.type(), autocast);
      for (const at::Tensor& result : run()) gradients.push_back(torch::ones_like(result.detach()));
    }
    return [&, run, gradients] {
      module.zero_grad(/*set_to_none=*/true);
      leaf.mutable_grad().reset();
      std::vector<at::Tensor> results;
      {
        const AutocastScope casts(bench.device.type(), autocast);
        results = run();
      }
      torch::autograd::backward(results, gradients);
    };
  };
  bench.compare("forward, beside the dense layer", forward([&] { experts->forward(x); }),
                forward([&] { dense->forward(x); }));
  bench.compare("forward and backward, beside the dense layer",
                training(*experts, [&] { return results_of(experts->forward(leaf)); }),
                training(*dense, [&] { return std::vector<at::Tensor>{dense->forward(leaf)}; }));
  // The products of the experts alone, as the block computes them: sorted rows, equal numbers for all
  // experts, weights already cast, on a GPU those of gate and up joined.
  const auto dtype = autocast.value_or(at::kFloat);
  const auto leaf_of = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes, bench.device).to(dtype).set_requires_grad(true);
  };
  const std::int64_t choices = bench.tokens * options.top_k;
  const at::Tensor rows = leaf_of({choices, options.width}), inner = leaf_of({choices, options.expert_width});
  const at::Tensor ends = at::arange(1, options.experts + 1, at::TensorOptions(bench.device).dtype(at::kLong))
                              .mul(choices)
                              .div(options.experts, "floor")
                              .to(at::kInt);
  const auto cast = [&](const at::Tensor& weight) {
    return weight.detach().to(dtype).set_requires_grad(true);
  };
  std::vector<at::Tensor> weights{cast(experts->gate), cast(experts->up)};
  if (cuda) weights = {cast(at::cat({experts->gate, experts->up}, 2))};
  const at::Tensor down = cast(experts->down);
  const auto products = [&] {
    std::vector<at::Tensor> results;
    for (const at::Tensor& weight : weights) results.push_back(grouped_product(rows, weight, ends));
    results.push_back(grouped_product(inner, down, ends));
    return results;
  };
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& result : products()) gradients.push_back(torch::ones_like(result));
  bench.compare("forward, beside its products alone", forward([&] { experts->forward(x); }),
                forward([&] { products(); }));
  bench.compare("forward and backward, beside its products alone",
                training(*experts, [&] { return results_of(experts->forward(leaf)); }), [&] {
                  for (at::Tensor& weight : weights) weight.mutable_grad().reset();
                  for (const at::Tensor* tensor : {&rows, &inner, &down}) tensor->mutable_grad().reset();
                  torch::autograd::backward(products(), gradients);
                });
  bench.compare("forward, beside the loop with indices", forward([&] { experts->forward(x); }),
                forward([&] { indexed_loop(experts, flat); }));
  bench.compare("forward and backward, beside the loop with indices",
                training(*experts, [&] { return results_of(experts->forward(leaf)); }),
                training(*experts, [&] { return std::vector<at::Tensor>{indexed_loop(experts, leaf[0])}; }));
  if (cuda) {
    const auto with_path = [&](GroupedProductPath path, const std::function<void()>& work) {
      return [&, path, work] {
        set_grouped_product_path(path);
        work();
        set_grouped_product_path(GroupedProductPath::Auto);
      };
    };
    const auto step = training(*experts, [&] { return results_of(experts->forward(leaf)); });
    bench.compare("forward and backward, own kernel beside LibTorch's",
                  with_path(GroupedProductPath::Kernel, step), with_path(GroupedProductPath::Auto, step));
  }
  bench.rounds = 1;
  bench.compare("forward, beside the loop with masks", forward([&] { experts->forward(x); }),
                forward([&] { masked_loop(experts, flat); }));
  return 0;
}
