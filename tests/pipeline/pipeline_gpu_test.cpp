// Pipelines on a GPU: all stages on one rank, every schedule that allows it, compared with a plain loop on
// the same device.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>
#include <vector>

#include "penstock/deferred_linear.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "penstock/torch/compat/streams.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace pipeline_gpu_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Block;

constexpr int kMicrobatches = 6;

TEST(PipelineOnAGpu, EverySchedule) {
  const at::Device device(at::kCUDA, 0);
  for (const ScheduleKind kind : schedule::all_schedule_kinds()) {
    if (kind == ScheduleKind::DualPipe) continue;  // needs two ranks
    SCOPED_TRACE(schedule::to_text(kind));
    const int stages = schedule::required_stages_per_rank(kind).value_or(3);
    comm::run_ranks(1, 60s, [&](comm::World& world) {
      std::vector<Block> blocks, copies;
      std::vector<PipelineStage> all;
      for (int i = 0; i < stages; ++i) {
        blocks.emplace_back(i);
        copies.emplace_back(i);
        blocks.back()->to(device);
        copies.back()->to(device);
        all.emplace_back(StageModule(blocks.back()), i, stages, device);
      }
      PipelineRuntime pipeline(
          all,
          schedule::generate(
              kind, {.ranks = 1, .stages_per_rank = stages, .microbatches = kMicrobatches, .group_size = {}}),
          test::square_loss(), {world});
      const test::Batch batch = test::plain_batch(0, 2 * kMicrobatches + 1);
      const at::Tensor x = batch.args[0].tensor().to(device), target = batch.target.tensor().to(device);
      const StepResult result = pipeline.step(Tree::tuple({x}), {}, target);
      const StepResult evaluated = pipeline.eval(Tree::tuple({x}), {}, target);
      const std::vector<Tree> xs = split_tree(x, kMicrobatches), targets = split_tree(target, kMicrobatches);
      for (std::size_t m = 0; m < xs.size(); ++m) {
        at::Tensor y = xs[m].tensor();
        for (Block& copy : copies) y = copy->forward(y);
        const at::Tensor loss = test::square_loss()(y, targets[m]);
        EXPECT_TRUE(at::allclose(result.losses[m], loss, 1e-5, 1e-6));
        EXPECT_TRUE(at::allclose(evaluated.losses[m], loss, 1e-5, 1e-6));
        loss.backward();
      }
      for (int i = 0; i < stages; ++i) {
        const auto ours = blocks[static_cast<std::size_t>(i)]->parameters(),
                   plain = copies[static_cast<std::size_t>(i)]->parameters();
        for (std::size_t k = 0; k < ours.size(); ++k)
          EXPECT_TRUE(at::allclose(ours[k].grad(), plain[k].grad() / kMicrobatches, 1e-4, 1e-6))
              << "stage " << i << ", parameter " << k;
      }
      EXPECT_TRUE(result.output->tensor().is_cuda());
    });
  }
}

// -------------------------------------------------------------------------------------------------
// overlapped units on two streams

constexpr std::int64_t kWide = 512;
constexpr int kBlocks = 4;
constexpr int kMany = 16;  // a power of two: dividing by it is exact

struct WideImpl : torch::nn::Module {
  WideImpl(int number, bool deferred) : deferred(deferred) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(300 + number));
    weight = register_parameter("weight", at::randn({kWide, kWide}, generator) * 0.03);
    bias = register_parameter("bias", at::randn({kWide}, generator) * 0.1);
    gain = register_parameter("gain", at::ones({kWide}) + 0.1 * at::randn({kWide}, generator));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::layer_norm(x, {kWide}, gain);
    return torch::gelu(deferred ? deferred_linear(h, weight, bias) : torch::linear(h, weight, bias)) + x;
  }
  bool deferred;
  at::Tensor weight, bias, gain;
};
TORCH_MODULE(Wide);

// Several steps of the two stages of a DualPipeV pipeline on one rank, compared with a plain loop in the
// order of its backwards. Rows differ from step to step, so that memory is freed and reused.
void expect_what_one_process_gives(const c10::Device& device, bool deferred) {
  comm::run_ranks(1, 120s, [&](comm::World& world) {
    std::vector<Wide> blocks, copies;
    std::vector<PipelineStage> stages;
    for (int s = 0; s < 2; ++s) {
      std::vector<StageModule> chain;
      for (int b = 0; b < kBlocks; ++b) {
        blocks.emplace_back(s * kBlocks + b, deferred);
        copies.emplace_back(s * kBlocks + b, false);
        blocks.back()->to(device);
        copies.back()->to(device);
        chain.emplace_back(blocks.back());
      }
      stages.emplace_back(StageModule::chain(chain), s, 2, device);
    }
    PipelineRuntime pipeline(
        stages,
        schedule::generate(ScheduleKind::DualPipeV,
                           {.ranks = 1, .stages_per_rank = 2, .microbatches = kMany, .group_size = {}}),
        test::square_loss(), {world});
    for (int step = 0; step < 4; ++step) {
      const std::int64_t rows = kMany * (64 + 32 * step);
      const at::Tensor x = test::values({rows, kWide}, 5 + step).to(device),
                       target = test::values({rows, kWide}, 50 + step).to(device);
      const StepResult result = pipeline.step(Tree::tuple({x}), {}, target);
      EXPECT_GT(pipeline.report().units_on_two_streams, 0);
      const auto trace = trace_last_step(pipeline);
      std::size_t overlapped = 0;
      for (const auto& event : trace->ranks[0]) overlapped += event.actions.size() > 1;
      EXPECT_EQ(overlapped, static_cast<std::size_t>(pipeline.report().units_on_two_streams));
      const std::vector<Tree> xs = split_tree(x, kMany), targets = split_tree(target, kMany);
      for (std::size_t m = 0; m < xs.size(); ++m) {
        at::Tensor y = xs[m].tensor();
        for (Wide& copy : copies) y = copy->forward(y);
        const at::Tensor loss = test::square_loss()(y, targets[m]);
        EXPECT_TRUE(result.losses[m].equal(loss)) << "loss " << m << " of step " << step;
        loss.backward();
      }
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        const auto ours = blocks[i]->parameters(), plain = copies[i]->parameters();
        for (std::size_t k = 0; k < ours.size(); ++k) {
          const at::Tensor wanted = plain[k].grad() / kMany;
          // A deferred layer may sum its weight gradients with other kernels.
          EXPECT_TRUE(deferred ? at::allclose(ours[k].grad(), wanted, 1e-4, 1e-5)
                               : ours[k].grad().equal(wanted))
              << "step " << step << ", block " << i << ", parameter " << k << ", off by "
              << (ours[k].grad() - wanted).abs().max().item<float>();
          ours[k].mutable_grad() = at::Tensor();
          plain[k].mutable_grad() = at::Tensor();
        }
      }
    }
  });
}

TEST(PipelineOnAGpu, OverlappedUnitsRunOnTwoStreams) {
  const at::Device device(at::kCUDA, 0);
  expect_what_one_process_gives(device, false);
}

TEST(PipelineOnAGpu, OverlappedUnitsWithDeferredWeights) {
  const at::Device device(at::kCUDA, 0);
  expect_what_one_process_gives(device, true);
}

TEST(PriorityStream, OneForEachDeviceOfTheHighestPriority) {
  const at::Device device(at::kCUDA, 0);
  std::vector<std::optional<c10::Stream>> found(8);
  std::vector<std::thread> threads;
  for (auto& each : found) threads.emplace_back([&each, device] { each = priority_stream(device); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& each : found) EXPECT_EQ(each, found[0]);
  ASSERT_TRUE(found[0].has_value());
  EXPECT_NE(*found[0], current_stream(device));
  int least = 0, greatest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  EXPECT_LT(greatest, least);
  EXPECT_EQ(c10::cuda::CUDAStream(*found[0]).priority(), greatest);
  EXPECT_FALSE(priority_stream(at::kCPU).has_value());
}

}  // namespace pipeline_gpu_test
}  // namespace penstock
