// Captured graphs on a GPU: capture and replay of a transformer of GPT-2's size, and of modules whose kernels
// exist only there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/graph/run/compiled.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/recompute.h"
#include "penstock/torch/compat/device_memory.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/random/generator_state.h"
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

// ---- states of the GPU's generator: seed and offset ----

struct NoisyGradient : torch::autograd::Function<NoisyGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * torch::rand_like(gradients[0])};
  }
};

at::Tensor state_of_gpu() { return generator_state(default_generator(kGpu)); }

TEST(RandomStatesOnAGpu, AreSeedAndOffset) {
  torch::manual_seed(17);
  const at::Tensor before = state_of_gpu();
  EXPECT_EQ(before.scalar_type(), at::kLong);
  EXPECT_TRUE(before.device().is_cpu());
  EXPECT_EQ(before[0].item<std::int64_t>(), 17);
  EXPECT_EQ(before[1].item<std::int64_t>(), 0);
  const at::Tensor a = torch::rand({1000}, kGpu), after = state_of_gpu();
  EXPECT_EQ(after[0].item<std::int64_t>(), 17);
  EXPECT_GT(after[1].item<std::int64_t>(), 0);
  set_generator_state(default_generator(kGpu), before);
  EXPECT_TRUE(torch::equal(torch::rand({1000}, kGpu), a));
  EXPECT_TRUE(torch::equal(state_of_gpu(), after));
}

// Dropout, draws in backward, a part that is recomputed, and draws on the CPU: bit for bit, with other draws
// between, and the same states in the end.
TEST(RandomStatesOnAGpu, CallsEqualThePlainFunction) {
  const Function function = [](const Values& in) -> Values {
    const at::Tensor x = in[0].toTensor();
    const at::Tensor part = recompute(
        [](const std::vector<at::Tensor>& inputs) { return torch::dropout(inputs[0].sin(), 0.4, true); },
        {torch::dropout(x, 0.3, true)});
    const at::Tensor scaled = part * torch::rand({1}).to(kGpu) + torch::randn_like(x);
    const at::Tensor rows = scaled.index_select(0, torch::randperm(x.size(0), kGpu));
    return {NoisyGradient::apply(rows * torch::rand(x.sizes(), kGpu))};
  };
  const auto steps = [](const std::function<Values(const Values&)>& call) {
    torch::manual_seed(23);
    std::vector<at::Tensor> all;
    for (int round = 0; round < 3; ++round) {
      const at::Tensor x = torch::linspace(-1, 1, 64 * 256, kGpu).view({64, 256}).set_requires_grad(true);
      const at::Tensor y = call({x})[0].toTensor();
      all.push_back(torch::rand({5}, kGpu));
      y.backward(torch::linspace(-1, 2, 64 * 256, kGpu).view({64, 256}));
      all.insert(all.end(), {y.detach(), x.grad(), torch::randn({5}, kGpu), torch::rand({2})});
    }
    all.insert(all.end(), {state_of_gpu(), generator_state(default_generator(at::kCPU))});
    return all;
  };
  // LibTorch's own engine has run before recompute() replaces it.
  torch::ones({2}, kGpu).set_requires_grad(true).exp().sum().backward();
  const std::vector<at::Tensor> expected = steps(function);
  for (const Partitioner partitioner : {Partitioner::Default, Partitioner::MinCut})
    for (const bool is_explicit : {false, true}) {
      SCOPED_TRACE(is_explicit ? "explicit" : "not explicit");
      Compiled compiled(function, {.partitioner = partitioner, .explicit_random_states = is_explicit});
      const std::vector<at::Tensor> actual = steps([&](const Values& in) { return compiled(in); });
      ASSERT_EQ(actual.size(), expected.size());
      for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
      if (!is_explicit) continue;
      EXPECT_EQ(compiled.meta(0).random_states, (std::vector<std::string>{"cuda:0", "cpu"}));
      EXPECT_EQ(compiled.meta(0).backward_random_states, 1u);
      const Graph& graph = compiled.joint(0).graph;
      const std::size_t first = compiled.joint(0).first_state_input();
      EXPECT_EQ(graph.inputs[first].name, "random_state[cuda:0]");
      EXPECT_EQ(graph[graph.inputs[first].value].geometry.dtype, at::kLong);
      EXPECT_TRUE(graph[graph.inputs[first].value].geometry.device.is_cpu());
    }
}

// Attention with dropout returns the seed and the offset that its backward draws from again.
TEST(RandomStatesOnAGpu, AttentionWithDropout) {
  const Deterministic deterministic(/*strict=*/false);
  const Function function = [](const Values& in) -> Values {
    const at::Tensor q = in[0].toTensor();
    return {at::scaled_dot_product_attention(q, q, q, {}, /*dropout_p=*/0.3, /*is_causal=*/true)};
  };
  const auto steps = [](const std::function<Values(const Values&)>& call) {
    torch::manual_seed(29);
    std::vector<at::Tensor> all;
    for (int round = 0; round < 2; ++round) {
      const at::Tensor q = torch::linspace(-1, 1, 2 * 4 * 64 * 32, kGpu)
                               .view({2, 4, 64, 32})
                               .to(at::kHalf)
                               .set_requires_grad(true);
      const at::Tensor y = call({q})[0].toTensor();
      all.push_back(torch::rand({5}, kGpu));
      y.sum().backward();
      all.insert(all.end(), {y.detach(), q.grad()});
    }
    all.push_back(state_of_gpu());
    return all;
  };
  const std::vector<at::Tensor> expected = steps(function);
  Compiled compiled(function, {.explicit_random_states = true});
  const std::vector<at::Tensor> actual = steps([&](const Values& in) { return compiled(in); });
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
}

}  // namespace graph_gpu_test
}  // namespace penstock::graph
