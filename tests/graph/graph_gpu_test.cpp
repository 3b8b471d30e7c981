// Captured graphs on a GPU: capture and replay of a transformer of GPT-2's size, and of modules whose kernels
// exist only there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <string>

#include "penstock/compile.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/torch/compat/device_memory.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/transformer.h"

namespace penstock::graph {
namespace graph_gpu_test {

namespace nn = torch::nn;
using namespace models;

const at::Device kGpu(at::kCUDA, 0);

// Selects kernels that sum in a fixed order. cuDNN's attention has one only in strict mode, in which cuBLAS
// requires a workspace setting. `strict` rejects operators without such a kernel.
struct Deterministic {
  explicit Deterministic(bool strict) {
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 1);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/!strict);
  }
  ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST(GraphOnAGpu, TransformerOfGpt2Size) {
  const Deterministic deterministic(/*strict=*/true);
  const TransformerOptions options{.vocabulary = 50304,
                                   .width = 768,
                                   .layers = 12,
                                   .heads = 12,
                                   .key_value_heads = 12,
                                   .feed_width = 2048,
                                   .context = 1024};
  TransformerStage plain(options), again(options), original(options);
  for (TransformerStage* model : {&plain, &again, &original}) {
    (*model)->to(kGpu);
    initialize(**model, {.seed = 5});
  }
  auto fast = compile(original);
  std::int64_t peak_of_plain = 0, peak_of_fast = 0;
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE(step);
    torch::manual_seed(step);
    const at::Tensor tokens = torch::randint(0, 50304, {4, 1024}, at::device(kGpu).dtype(at::kLong)),
                     targets = tokens.roll(-1, 1);
    const auto train = [&](auto& model, std::int64_t* peak) {
      reset_peak_device_bytes(kGpu);
      const std::int64_t before = live_device_bytes(kGpu);
      at::Tensor loss;
      {
        const AutocastScope casts(at::kCUDA, at::kBFloat16);
        loss = token_loss(model->forward(tokens), targets, static_cast<double>(targets.numel()));
      }
      loss.backward();
      *peak = peak_device_bytes(kGpu) - before;
      return loss.detach();
    };
    const at::Tensor expected = train(plain, &peak_of_plain), repeated = train(again, &peak_of_plain),
                     actual = train(fast, &peak_of_fast);
    EXPECT_TRUE(torch::equal(repeated, expected));
    EXPECT_TRUE(torch::equal(actual, expected)) << actual << expected;
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      const at::Tensor wanted = plain->parameters()[i].grad(), other = again->parameters()[i].grad(),
                       gradient = original->parameters()[i].grad();
      const std::string name = plain->named_parameters().keys()[i];
      ASSERT_TRUE(gradient.defined()) << name;
      EXPECT_TRUE(torch::equal(other, wanted)) << name << ": the model itself";
      EXPECT_TRUE(torch::equal(gradient, wanted)) << name;
      // The same for all, so that the next step begins with equal values.
      const at::Tensor change = wanted * 0.1;
      for (const auto& model : {plain, again, original}) {
        model->parameters()[i].sub_(change);
        model->parameters()[i].mutable_grad() = at::Tensor();
      }
    }
  }
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u);
  EXPECT_EQ(count_writes(compiled_entry(*fast, 0).joint(0).graph), 0u);
  EXPECT_LE(peak_of_fast, peak_of_plain);
  EXPECT_GT(peak_of_fast, 0);
}

// Batch norm and recurrent layers have separate kernels on a GPU.
TEST(GraphOnAGpu, ModulesWithTheirOwnKernels) {
  const Deterministic deterministic(/*strict=*/false);  // max pooling has no deterministic kernel
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
        EXPECT_TRUE(
            torch::allclose(original->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-5, 1e-6))
            << plain->named_parameters().keys()[i];
      for (std::size_t i = 0; i < plain->buffers().size(); ++i)
        EXPECT_TRUE(torch::equal(original->buffers()[i], plain->buffers()[i]))
            << plain->named_buffers().keys()[i];
    }
    EXPECT_EQ(count_writes(compiled_entry(*fast, 0).joint(0).graph), 0u);
  };
  const auto twice = [&](auto make, const at::Tensor& x) {
    torch::manual_seed(4);
    const auto plain = make();
    torch::manual_seed(4);
    expect_same_steps(plain, make(), x.to(kGpu));
  };
  twice(
      [] {
        return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)), nn::BatchNorm2d(4),
                              nn::ReLU(), nn::MaxPool2d(2))
            .ptr();
      },
      torch::randn({2, 3, 8, 8}));
  twice(
      [] {
        return nn::Sequential(nn::Linear(4, 8), nn::LayerNorm(nn::LayerNormOptions({8})), nn::GELU(),
                              nn::Linear(8, 4))
            .ptr();
      },
      torch::randn({5, 4}));
}

}  // namespace graph_gpu_test
}  // namespace penstock::graph
