// Microseconds per optimizer step for 150 parameters of a transformer, Penstock and torch::optim, and their
// ratio within short rounds of one run. On the CPU this is CPU time of all threads (OMP_NUM_THREADS), so that
// other load does not affect it; on CUDA it is elapsed time. Usage: optim_bench [cpu|cuda] [width, 64 by
// default]
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

#include "bench/figures.h"
#include "penstock/gradients.h"
#include "penstock/optimizer.h"

namespace {

using namespace penstock::optim;
using penstock::bench::median;
using Clock = std::chrono::steady_clock;

// 16 blocks of 9 parameters, plus embedding, head and norms: 150 in total.
std::vector<NamedParameter> make(at::Device device, std::int64_t width) {
  std::vector<NamedParameter> result;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape) {
    at::Tensor p = at::randn(shape, at::TensorOptions(device)).set_requires_grad(true);
    p.mutable_grad() = at::randn_like(p) * 1e-2;
    result.push_back({name, p});
  };
  add("embed.weight", {256, width});
  for (int block = 0; block < 16; ++block) {
    const std::string prefix = "blocks." + std::to_string(block);
    add(prefix + ".attention_norm.weight", {width});
    for (const char* name : {"query", "key", "value", "output"})
      add(prefix + ".attention." + name + ".weight", {width, width});
    add(prefix + ".feed_norm.weight", {width});
    add(prefix + ".feed.gate.weight", {3 * width, width});
    add(prefix + ".feed.up.weight", {3 * width, width});
    add(prefix + ".feed.down.weight", {width, 3 * width});
  }
  add("norm.weight", {width});
  add("head.weight", {256, width});
  for (int i = 0; result.size() < 150; ++i) add("extra." + std::to_string(i), {width});
  return result;
}

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> result;
  for (const NamedParameter& parameter : parameters) result.push_back(parameter.tensor);
  return result;
}

double now_us(at::Device device) {
  if (!device.is_cuda()) return static_cast<double>(std::clock()) * 1e6 / CLOCKS_PER_SEC;
  torch::cuda::synchronize();
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

void compare(at::Device device, const std::string& name, const std::function<void()>& ours,
             const std::function<void()>& theirs) {
  for (int i = 0; i < 3; ++i) ours(), theirs();
  std::vector<double> own, other, ratios;
  constexpr int kSteps = 10;
  const auto time = [&](const std::function<void()>& work) {
    const double start = now_us(device);
    for (int i = 0; i < kSteps; ++i) work();
    return (now_us(device) - start) / kSteps;
  };
  for (int round = 0; round < 21; ++round) {
    own.push_back(time(ours));
    other.push_back(time(theirs));
    ratios.push_back(own.back() / other.back());
  }
  std::printf("%-30s %10.1f %10.1f %7.2f\n", name.c_str(), median(own), median(other), median(ratios));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const bool cuda = argc > 1 && std::strcmp(argv[1], "cuda") == 0;
  const at::Device device(cuda ? at::kCUDA : at::kCPU, cuda ? 0 : -1);
  const std::int64_t width = argc > 2 ? std::atoll(argv[2]) : 64;
  if (width < 1) {
    std::fprintf(stderr, "optim_bench: width %s: expected a positive number\n", argv[2]);
    return 2;
  }
  const auto own = make(device, width), other = make(device, width);
  std::int64_t elements = 0;
  for (const NamedParameter& parameter : own) elements += parameter.tensor.numel();
  std::printf("%s, %zu parameters, %.2f M elements, %d threads; us per step\n%-30s %10s %10s %7s\n",
              cuda ? "CUDA" : "CPU", own.size(), static_cast<double>(elements) * 1e-6, at::get_num_threads(),
              "", "Penstock", "LibTorch", "ratio");
  torch::optim::AdamW adamw(tensors_of(other), torch::optim::AdamWOptions(1e-6));
  torch::optim::SGD sgd(tensors_of(other), torch::optim::SGDOptions(1e-6).momentum(0.9).weight_decay(0.1));
  for (const Kernels kernels : {Kernels::Auto, Kernels::Foreach}) {
    const std::string suffix = kernels == Kernels::Auto ? ", one kernel" : ", foreach";
    AdamW own_adamw(own, {.lr = 1e-6, .kernels = kernels});
    compare(
        device, "AdamW" + suffix, [&] { own_adamw.step(); }, [&] { adamw.step(); });
    SGD own_sgd(own, {.lr = 1e-6, .momentum = 0.9, .weight_decay = 0.1, .kernels = kernels});
    compare(
        device, "SGD with momentum" + suffix, [&] { own_sgd.step(); }, [&] { sgd.step(); });
  }
  const std::vector<at::Tensor> gradients = tensors_of(other);
  compare(
      device, "norm below the limit", [&] { clip_grad_norm(own, 1e30); },
      [&] { torch::nn::utils::clip_grad_norm_(gradients, 1e30); });
  return 0;
}
