// The state-space block: the scan compared with a plain recurrence, one tensor operation after another, at
// 1,024 tokens; the scan for rows of 256 to 16,384 tokens, whose time per token must not grow; and the whole
// block. On the CPU this is CPU time of all threads (OMP_NUM_THREADS), in float32; on CUDA it is elapsed
// time, in bfloat16. Usage: state_space_bench [cpu|cuda] [width, 768 by default] [batch of the block, by
// default 1 on the CPU and 16 on CUDA]
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <optional>
#include <vector>

#include "bench/figures.h"
#include "penstock/models/blocks/state_space.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/scan/selective_scan.h"

namespace {

using namespace penstock;
using bench::median;
using Clock = std::chrono::steady_clock;

struct Machine {
  at::Device device;
  at::ScalarType dtype;

  double now_ms() const {
    if (!device.is_cuda()) return static_cast<double>(std::clock()) * 1e3 / CLOCKS_PER_SEC;
    torch::cuda::synchronize();
    return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
  }
  double time_ms(const std::function<void()>& work) const {
    const double start = now_ms();
    work();
    return now_ms() - start;
  }
  double median_ms(const std::function<void()>& work, int rounds) const {
    work();  // the first call compiles kernels and allocates memory
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) times.push_back(time_ms(work));
    return median(times);
  }
};

SelectiveScan scan_of(const Machine& machine, const models::StateSpaceOptions& options, std::int64_t length) {
  const auto random = [&](at::IntArrayRef sizes) {
    return at::randn(sizes, machine.device).to(machine.dtype);
  };
  const std::int64_t heads = options.heads();
  return {.values = random({1, length, heads, options.state_head_width}),
          .steps = at::softplus(at::randn({1, length, heads}, machine.device) - 4),
          .decay = -at::linspace(1, 16, heads, machine.device),
          .keys = random({1, length, options.state_groups, options.state_size}),
          .queries = random({1, length, options.state_groups, options.state_size}),
          .skip = at::ones({heads}, machine.device),
          .chunk = options.state_chunk};
}

// What a model without a scan would do. Groups: one.
at::Tensor recurrence(const SelectiveScan& scan) {
  at::Tensor state =
      at::zeros({1, scan.values.size(2), scan.values.size(3), scan.keys.size(3)}, scan.steps.options());
  std::vector<at::Tensor> results;
  for (std::int64_t t = 0; t < scan.values.size(1); ++t) {
    const at::Tensor value = scan.values.select(1, t), step = scan.steps.select(1, t);
    const at::Tensor input = (step.unsqueeze(-1) * value).unsqueeze(-1);
    state = state * at::exp(step * scan.decay).unsqueeze(-1).unsqueeze(-1) +
            input * scan.keys.select(1, t).unsqueeze(-2);
    results.push_back(
        at::matmul(state, scan.queries.select(1, t).unsqueeze(-1).to(state.scalar_type())).squeeze(-1) +
        scan.skip.unsqueeze(-1) * value);
  }
  return at::stack(results, 1);
}

void compare_with_recurrence(const Machine& machine, const models::StateSpaceOptions& options) {
  const at::NoGradGuard no_grad;
  const SelectiveScan scan = scan_of(machine, options, 1024);
  const at::Tensor ours = selective_scan(scan).values.to(at::kFloat), plain = recurrence(scan).to(at::kFloat);
  const double off = ((ours - plain).abs().max() / plain.abs().max()).item<double>();
  std::vector<double> own, other, ratios;
  for (int round = 0; round < 5; ++round) {
    own.push_back(machine.time_ms([&] { selective_scan(scan); }));
    other.push_back(machine.time_ms([&] { recurrence(scan); }));
    ratios.push_back(other.back() / own.back());
  }
  std::printf("1,024 tokens: scan %.2f ms, recurrence %.1f ms, ratio %.1f (results differ by %.1e)\n",
              median(own), median(other), median(ratios), off);
}

void show_lengths(const Machine& machine, const models::StateSpaceOptions& options) {
  std::printf("%8s %14s %22s\n", "tokens", "forward us", "forward+backward us (per token)");
  for (std::int64_t length = 256; length <= 16384; length *= 2) {
    SelectiveScan scan = scan_of(machine, options, length);
    const int rounds = length > 4096 ? 3 : 5;
    const double forward = machine.median_ms(
        [&] {
          const at::NoGradGuard no_grad;
          selective_scan(scan);
        },
        rounds);
    for (at::Tensor* input : {&scan.values, &scan.steps, &scan.decay, &scan.keys, &scan.queries, &scan.skip})
      input->set_requires_grad(true);
    const at::Tensor by = at::randn_like(scan.values);
    const double both = machine.median_ms([&] { selective_scan(scan).values.backward(by); }, rounds);
    const double per_token = 1e3 / static_cast<double>(length);
    std::printf("%8lld %14.2f %22.2f\n", static_cast<long long>(length), forward * per_token,
                both * per_token);
    std::fflush(stdout);
  }
}

void show_block(const Machine& machine, const models::StateSpaceOptions& options, std::int64_t batch) {
  models::StateSpace block(options, 0);
  block->to(machine.device);
  block->initialize("blocks.0.state_space", {.seed = 1});
  const at::Tensor x = at::randn({batch, 1024, options.width}, machine.device).set_requires_grad(true);
  const std::optional<at::ScalarType> casts =
      machine.device.is_cuda() ? std::optional<at::ScalarType>(at::kBFloat16) : std::nullopt;
  const auto forward = [&] {
    const AutocastScope scope(machine.device.type(), casts);
    return block->forward(x);
  };
  const double once = machine.median_ms(
      [&] {
        const at::NoGradGuard no_grad;
        forward();
      },
      7);
  const double both = machine.median_ms(
      [&] {
        forward().to(at::kFloat).mean().backward();
        block->zero_grad();
        x.mutable_grad() = at::Tensor();
      },
      7);
  const double flops = models::flops_per_token(options, 1024) * static_cast<double>(batch) * 1024;
  std::printf(
      "block, %lld x 1,024 tokens: forward %.2f ms (%.1f GFLOP/s), forward+backward %.2f ms (%.1f GFLOP/s)\n",
      static_cast<long long>(batch), once, flops / once * 1e-6, both, 3 * flops / both * 1e-6);
}

}  // namespace

int main(int argc, char** argv) {
  const bool cuda = argc > 1 && std::strcmp(argv[1], "cuda") == 0;
  const Machine machine{at::Device(cuda ? at::kCUDA : at::kCPU, cuda ? 0 : -1),
                        cuda ? at::kBFloat16 : at::kFloat};
  const models::StateSpaceOptions options{.width = argc > 2 ? std::atoll(argv[2]) : 768};
  options.check();
  const std::int64_t batch = argc > 3 ? std::atoll(argv[3]) : cuda ? 16 : 1;
  torch::manual_seed(1);
  std::printf("%s, %s, width %lld: %lld heads of %lld, state %lld, chunk %lld, %d threads\n",
              cuda ? "CUDA" : "CPU", c10::toString(machine.dtype), static_cast<long long>(options.width),
              static_cast<long long>(options.heads()), static_cast<long long>(options.state_head_width),
              static_cast<long long>(options.state_size), static_cast<long long>(options.state_chunk),
              at::get_num_threads());
  compare_with_recurrence(machine, options);
  show_lengths(machine, options);
  show_block(machine, options, batch);
  return 0;
}
