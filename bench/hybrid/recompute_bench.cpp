// Recomputing the E blocks of a hybrid model: bytes that a microbatch keeps between forward and backward, the
// peak of a step, and the time of a step, each beside a model that keeps everything. On the CPU with one
// thread (OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1), in CPU time, so that other load affects it little.
//
// Usage: recompute_bench [pattern] [width] [expert width] [experts] [tokens of a row] [microbatches]
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "penstock/hybrid.h"
#include "penstock/language_model.h"
#include "penstock/step_context.h"
#include "penstock/torch/compat/cpu_memory.h"

namespace {

using namespace penstock;

struct Figures {
  double kept = 0, peak = 0, ms = 0;  // bytes of all microbatches, bytes, CPU time
};

class Bench {
 public:
  Bench(const models::HybridOptions& options, std::int64_t tokens, int microbatches)
      : stage_(options), microbatches_(microbatches) {
    stage_->set_initial_values(1);
    tokens_ = at::randint(options.vocabulary, {2, tokens}, at::kLong);
    for (const at::Tensor& parameter : stage_->parameters())
      parameter.mutable_grad() = at::zeros_like(parameter);
  }

  // All forwards, then all backwards, as the first stage of a pipeline has them.
  Figures step(const models::RecomputePlan& plan) {
    stage_->set_recompute(plan);
    Figures figures;
    const auto before = static_cast<double>(cpu_memory().live);
    reset_cpu_peak();
    const std::clock_t begin = std::clock();
    std::vector<at::Tensor> losses;
    for (int m = 0; m < microbatches_; ++m) {
      const StepGuard step(context(m));
      const at::Tensor logits = stage_->forward(tokens_);
      losses.push_back(models::token_loss(logits, tokens_, static_cast<double>(tokens_.numel())));
    }
    figures.kept = static_cast<double>(cpu_memory().live) - before;
    for (int m = 0; m < microbatches_; ++m) {
      const StepGuard step(context(m));
      losses[static_cast<std::size_t>(m)].backward();
      losses[static_cast<std::size_t>(m)].reset();
    }
    figures.ms = 1e3 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    figures.peak = static_cast<double>(cpu_memory().peak) - before;
    return figures;
  }

 private:
  StepContext context(int microbatch) const {
    StepContext context;
    context.microbatch = microbatch;
    context.microbatches = microbatches_;
    return context;
  }

  models::HybridStage stage_;
  int microbatches_;
  at::Tensor tokens_;
};

double mebibytes(double bytes) { return bytes / (1 << 20); }

}  // namespace

int main(int count, char** arguments) {
  const auto number = [&](int at, std::int64_t otherwise) {
    return count > at ? std::atoll(arguments[at]) : otherwise;
  };
  count_cpu_memory();
  at::set_num_threads(1);
  models::HybridOptions options{.pattern = count > 1 ? arguments[1] : "AEMEAEME", .vocabulary = 260};
  options.width = number(2, 128);
  options.expert_width = number(3, 128);
  options.experts = number(4, 8);
  options.context = number(5, 256);
  options.heads = 4;
  options.key_value_heads = 2;
  options.attention_feed = false;
  options.feed_width = 2 * options.width;
  options.state_size = 32;
  options.state_head_width = 32;
  options.state_chunk = 64;
  Bench bench(options, options.context, static_cast<int>(number(6, 4)));
  const models::ModelPlan model = options.plan();
  std::printf("pattern %s, width %lld, %lld experts of width %lld, rows of %lld tokens\n",
              options.pattern.c_str(), static_cast<long long>(options.width),
              static_cast<long long>(options.experts), static_cast<long long>(options.expert_width),
              static_cast<long long>(options.context));
  constexpr int kRounds = 9;
  for (const char* text : {"experts", "attention", "block"}) {
    const models::RecomputePlan none, plan = models::parse_recompute(text, model);
    bench.step(none);
    bench.step(plan);
    Figures plain, again;
    std::vector<double> ratios;
    for (int round = 0; round < kRounds; ++round) {
      plain = bench.step(none);
      again = bench.step(plan);
      ratios.push_back(again.ms / plain.ms);
    }
    std::printf(
        "%-10s kept %.2f MiB instead of %.2f (%.2f x less), peak %.2f instead of %.2f (%.2f x less), step "
        "time x "
        "%.3f\n",
        text, mebibytes(again.kept), mebibytes(plain.kept), plain.kept / again.kept, mebibytes(again.peak),
        mebibytes(plain.peak), plain.peak / again.peak, penstock::bench::median(ratios));
  }
  return 0;
}
