// Memory held by a split backward: less after its first half than before, none after its second.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "penstock/compiled_stage.h"
#include "penstock/deferred_linear.h"
#include "penstock/pipeline/backward/split_backward.h"

namespace penstock {
namespace split_backward_memory_test {

std::atomic<std::int64_t> live_bytes{0}, peak_bytes{0};

// Counts in a header before the data. LibTorch versions declare allocate() with or without const: both are
// defined here.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) const { return take(bytes); }
  c10::DataPtr allocate(std::size_t bytes) { return take(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const { std::memcpy(to, from, bytes); }

 private:
  static constexpr std::size_t kHeader = 64;
  static c10::DataPtr take(std::size_t bytes) {
    if (bytes == 0) return {nullptr, nullptr, &give_back, c10::Device(c10::kCPU)};
    void* block = nullptr;
    if (posix_memalign(&block, kHeader, bytes + kHeader) != 0) throw std::bad_alloc();
    std::memcpy(block, &bytes, sizeof bytes);
    const std::int64_t now = live_bytes += static_cast<std::int64_t>(bytes);
    if (now > peak_bytes) peak_bytes = now;
    void* data = static_cast<char*>(block) + kHeader;
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  static void give_back(void* data) {
    if (!data) return;
    void* block = static_cast<char*>(data) - kHeader;
    std::size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof bytes);
    live_bytes -= static_cast<std::int64_t>(bytes);
    std::free(block);
  }
};

class SplitBackwardMemory : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    static CountingAllocator allocator;
    c10::SetAllocator(c10::kCPU, &allocator, 100);
  }

  SplitBackwardMemory() {
    torch::manual_seed(1);
    for (at::Tensor& w : norms) w = at::ones({kWidth}).requires_grad_(true);
    for (at::Tensor& w : ups) w = (at::randn({4 * kWidth, kWidth}) * 0.1).requires_grad_(true);
    for (at::Tensor& w : downs) w = (at::randn({kWidth, 4 * kWidth}) * 0.1).requires_grad_(true);
    table = at::randn({50, kWidth}).requires_grad_(true);
    for (const auto* list : {&norms, &ups, &downs})
      for (const at::Tensor& w : *list) w.mutable_grad() = at::zeros_like(w);
    table.mutable_grad() = at::zeros_like(table);
  }

  // Operators without weights hold most of the memory here, as they do in attention.
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < norms.size(); ++i) {
      const at::Tensor h = at::layer_norm(x, {kWidth}, norms[i], at::Tensor());
      const at::Tensor mixed = at::softmax(at::matmul(h, h.transpose(0, 1)) * 0.1, -1).mm(h);
      x = x + at::linear(at::gelu(at::linear(mixed, ups[i]).sin() * 2).tanh(), downs[i]);
    }
    return x;
  }

  static constexpr std::int64_t kRows = 64, kWidth = 32;
  std::vector<at::Tensor> norms{4}, ups{4}, downs{4};
  at::Tensor table;
};

TEST_F(SplitBackwardMemory, HalvesFreeMemory) {
  for (const bool first_stage : {false, true}) {
    at::Tensor x =
        first_stage ? at::randint(50, {kRows}, at::kLong) : at::randn({kRows, kWidth}).requires_grad_(true);
    const std::int64_t start = live_bytes;
    at::Tensor y = forward(first_stage ? at::embedding(table, x) : x);
    at::Tensor grad = at::ones_like(y);
    const std::int64_t before = live_bytes - start;
    OutputEdges edges = OutputEdges::of({y});
    y.reset();
    peak_bytes = live_bytes.load();
    InputBackward half = stage_backward_input(std::move(edges), {grad}, {x});
    grad.reset();
    half.input_grads.clear();
    const std::int64_t after = live_bytes - start, peak = peak_bytes - start;
    EXPECT_LT(after, before * 6 / 10);
    EXPECT_LT(peak, before * 5 / 4);  // freed on the way, not at the end
    EXPECT_GT(after, 0);
    half.weights.run();
    EXPECT_EQ(live_bytes - start, 0);
  }
}

// The same of a captured stage whose backward consists of two graphs.
TEST_F(SplitBackwardMemory, HalvesOfACapturedStageFreeMemory) {
  const auto module = std::make_shared<torch::nn::Module>();
  for (std::size_t i = 0; i < norms.size(); ++i) {
    module->register_parameter("norm" + std::to_string(i), norms[i]);
    module->register_parameter("up" + std::to_string(i), ups[i]);
    module->register_parameter("down" + std::to_string(i), downs[i]);
  }
  module->register_parameter("table", table);
  CompiledStageOptions options;
  options.compile.split_backward = true;
  // Inputs that nobody holds are not kept for a second derivative anyway.
  options.compile.second_derivatives = graph::SecondDerivatives::Refuse;
  for (const bool first_stage : {false, true}) {
    const StageModule stage = compiled_stage(
        StageModule(
            [this, first_stage](at::Tensor x) { return forward(first_stage ? at::embedding(table, x) : x); },
            {module}),
        options);
    at::Tensor x =
        first_stage ? at::randint(50, {kRows}, at::kLong) : at::randn({kRows, kWidth}).requires_grad_(true);
    for (const bool warm : {false, true}) {
      const std::int64_t start = live_bytes;
      at::Tensor y = stage.forward(Tree::tuple({x}), Tree()).tensor();
      at::Tensor grad = at::ones_like(y);
      const std::int64_t before = live_bytes - start;
      OutputEdges edges = OutputEdges::of({y});
      y.reset();
      peak_bytes = live_bytes.load();
      InputBackward half = stage_backward_input(std::move(edges), {grad}, {x});
      grad.reset();
      half.input_grads.clear();
      const std::int64_t after = live_bytes - start, peak = peak_bytes - start;
      EXPECT_TRUE(half.weights.pending());
      if (warm) {
        EXPECT_LT(after, before * 6 / 10);
        EXPECT_LT(peak, before * 5 / 4);
        EXPECT_GT(after, 0);
      }
      half.weights.run();
      if (warm) {
        EXPECT_EQ(live_bytes - start, 0);
      }
    }
    // A half that is dropped.
    const std::int64_t start = live_bytes;
    {
      const at::Tensor y = stage.forward(Tree::tuple({x}), Tree()).tensor();
      const InputBackward half = stage_backward_input(OutputEdges::of({y}), {at::ones_like(y)}, {x});
      EXPECT_TRUE(half.weights.pending());
    }
    EXPECT_EQ(live_bytes - start, 0);
  }
}

TEST_F(SplitBackwardMemory, AHalfThatIsDroppedFreesAll) {
  const at::Tensor x = at::randn({kRows, kWidth}).requires_grad_(true);
  const std::int64_t start = live_bytes;
  {
    const at::Tensor y = forward(x);
    const InputBackward half = stage_backward_input(OutputEdges::of({y}), {at::ones_like(y)}, {x});
    EXPECT_TRUE(half.weights.pending());
  }
  EXPECT_EQ(live_bytes - start, 0);
}

TEST_F(SplitBackwardMemory, OnePassFreesMemory) {
  const at::Tensor x = at::randn({kRows, kWidth}).requires_grad_(true);
  const std::int64_t start = live_bytes;
  at::Tensor y = forward(x);
  OutputEdges edges = OutputEdges::of({y});
  const at::Tensor grad = at::ones_like(y);
  y.reset();
  stage_backward(std::move(edges), {grad}, {x});
  EXPECT_EQ(live_bytes - start, static_cast<std::int64_t>(grad.nbytes()));
}

TEST_F(SplitBackwardMemory, TheQueueFreesMemory) {
  const at::Tensor x = at::randn({kRows, kWidth}).requires_grad_(true);
  const std::int64_t start = live_bytes;
  {
    WeightQueue queue;
    at::Tensor y;
    {
      const WeightQueueGuard guard(queue);
      y = deferred_linear(at::gelu(deferred_linear(x, ups[0], {})).sin().tanh(), downs[0], {}).sum();
    }
    const std::int64_t before = live_bytes - start;
    y.backward();
    y.reset();
    x.mutable_grad() = at::Tensor();
    EXPECT_LT(live_bytes - start, before);
    queue.run();
    EXPECT_EQ(live_bytes - start, 0);
  }
}

}  // namespace split_backward_memory_test
}  // namespace penstock
