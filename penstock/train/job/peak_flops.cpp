#include "penstock/train/job/peak_flops.h"

#include <ATen/ATen.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace penstock::train {

double product_flops(at::Device device, const std::string& precision, double seconds) {
  using Clock = std::chrono::steady_clock;
  const at::NoGradGuard no_grad;
  const at::ScalarType type = precision == "bf16"                       ? at::kBFloat16
                              : precision == "fp16" && !device.is_cpu() ? at::kHalf
                                                                        : at::kFloat;
  // Large enough to reach the peak, small enough for several products in the available time.
  const std::int64_t size = device.is_cpu() ? 512 : 8192;
  const int products = device.is_cpu() ? 1 : 4;  // between two clock reads
  // Values do not affect the time on a CPU, but zeros draw less power on a GPU than real values.
  const at::Tensor values = at::arange(size * size, at::TensorOptions().dtype(at::kFloat).device(device))
                                .remainder(17)
                                .sub(8)
                                .view({size, size})
                                .to(type);
  at::Tensor result = at::mm(values, values);
  const auto finish = [&] {
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
  };
  finish();
  double best = 0;
  const auto begin = Clock::now();
  do {
    const auto start = Clock::now();
    for (int i = 0; i < products; ++i) at::mm_out(result, values, values);
    finish();
    const double taken = std::chrono::duration<double>(Clock::now() - start).count();
    const auto edge = static_cast<double>(size);
    if (taken > 0) best = std::max(best, 2 * edge * edge * edge * products / taken);
  } while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds);
  return best;
}

double peak_flops(const comm::World& world, at::Device device, const std::string& precision) {
  // Start together: no rank measures while another is still busy.
  at::Tensor sum = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device));
  world.group().all_reduce(sum, comm::ReduceOp::Sum, {.label = "peak: begin", .timeout = {}}).wait();
  sum.fill_(product_flops(device, precision));
  world.group().all_reduce(sum, comm::ReduceOp::Sum, {.label = "peak: sum", .timeout = {}}).wait();
  return sum.item<double>();
}

}  // namespace penstock::train
