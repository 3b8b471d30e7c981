// Captured graphs on a GPU: capture and replay of a transformer of GPT-2's size, and of modules whose kernels exist only there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/graph/compiled_module.h"
#include "penstock/models/initialize.h"
#include "penstock/models/loss.h"
#include "penstock/models/transformer.h"
#include "penstock/torch/autocast_scope.h"
#include "penstock/torch/device_memory.h"

namespace penstock::graph {
namespace {

namespace nn = torch::nn;
using namespace models;

const at::Device kGpu(at::kCUDA, 0);

// Kernels that add up in an order of their own would not give the same bits twice.
struct Deterministic {
  Deterministic() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true); }
  ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST(GraphOnAGpu, TransformerOfGpt2Size) {
  const Deterministic deterministic;
  const TransformerOptions options{.vocabulary = 50304, .width = 768, .layers = 12, .heads = 12, .key_value_heads = 12, .feed_width = 2048, .context = 1024};
  TransformerStage plain(options), original(options);
  for (TransformerStage* model : {&plain, &original}) {
    (*model)->to(kGpu);
    initialize(**model, {.seed = 5});
  }
  auto fast = compile(original);
  std::int64_t peaks[2] = {0, 0};
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE(step);
    torch::manual_seed(step);
    const at::Tensor tokens = torch::randint(0, 50304, {4, 1024}, at::device(kGpu).dtype(at::kLong)), targets = tokens.roll(-1, 1);
    at::Tensor losses[2];
    const auto train = [&](auto& model, int which) {
      reset_peak_device_bytes(kGpu);
      const std::int64_t before = live_device_bytes(kGpu);
      {
        const AutocastScope casts(at::kCUDA, at::kBFloat16);
        losses[which] = token_loss(model->forward(tokens), targets, static_cast<double>(targets.numel()));
      }
      losses[which].backward();
      peaks[which] = peak_device_bytes(kGpu) - before;
      losses[which] = losses[which].detach();
    };
    train(plain, 0);
    train(fast, 1);
    EXPECT_TRUE(torch::equal(losses[1], losses[0])) << losses[1] << losses[0];
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      const at::Tensor a = original->parameters()[i], b = plain->parameters()[i];
      ASSERT_TRUE(a.grad().defined());
      EXPECT_TRUE(torch::equal(a.grad(), b.grad())) << plain->named_parameters().keys()[i];
      for (const at::Tensor& each : {a, b}) {
        each.sub_(each.grad(), 0.1);
        each.mutable_grad() = at::Tensor();
      }
    }
  }
  EXPECT_EQ(fast->compiled(0).captures(), 1u);
  EXPECT_EQ(count_writes(fast->compiled(0).joint(0).graph), 0u);
  EXPECT_LE(peaks[1], peaks[0]);
  EXPECT_GT(peaks[1], 0);
}

// Batch norm and recurrent layers have kernels of their own on a GPU.
TEST(GraphOnAGpu, ModulesWithTheirOwnKernels) {
  const Deterministic deterministic;
  torch::manual_seed(3);
  const auto expect_same_steps = [](const auto& plain, const auto& original, const at::Tensor& x) {
    plain->to(kGpu);
    original->to(kGpu);
    auto fast = compile(original);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor expected = plain->forward(x), actual = fast->forward(x);
      EXPECT_TRUE(torch::equal(actual, expected));
      expected.pow(2).sum().backward();
      actual.pow(2).sum().backward();
      for (std::size_t i = 0; i < plain->parameters().size(); ++i)
        EXPECT_TRUE(torch::allclose(original->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-5, 1e-6)) << plain->named_parameters().keys()[i];
      for (std::size_t i = 0; i < plain->buffers().size(); ++i)
        EXPECT_TRUE(torch::equal(original->buffers()[i], plain->buffers()[i])) << plain->named_buffers().keys()[i];
    }
    EXPECT_EQ(count_writes(fast->compiled(0).joint(0).graph), 0u);
  };
  const auto twice = [&](auto make, const at::Tensor& x) {
    torch::manual_seed(4);
    const auto plain = make();
    torch::manual_seed(4);
    expect_same_steps(plain, make(), x.to(kGpu));
  };
  twice([] {
    return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)), nn::BatchNorm2d(4), nn::ReLU(), nn::MaxPool2d(2)).ptr();
  }, torch::randn({2, 3, 8, 8}));
  twice([] { return nn::Sequential(nn::Linear(4, 8), nn::LayerNorm(nn::LayerNormOptions({8})), nn::GELU(), nn::Linear(8, 4)).ptr(); }, torch::randn({5, 4}));
}

}  // namespace
}  // namespace penstock::graph
