#include "penstock/compile.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::graph {
namespace compiled_module_test {

namespace nn = torch::nn;
using test::has_text;
using test::message_of;
using Tensors = std::vector<at::Tensor>;

void collect(const at::Tensor& value, Tensors* all) { all->push_back(value); }
template <class... Ts>
void collect(const std::tuple<Ts...>& values, Tensors* all) {
  std::apply([&](const Ts&... each) { (collect(each, all), ...); }, values);
}

// The effects of a training step.
struct Step {
  Tensors outputs, gradients, state;
};

template <class Module, class Call>
Step step_of(Module& module, const Call& call, const Tensors& inputs, int number) {
  Tensors fresh;
  for (const at::Tensor& input : inputs)
    fresh.push_back(input.detach().clone().set_requires_grad(input.requires_grad()));
  module->zero_grad();
  torch::manual_seed(100 + number);
  Step step;
  collect(call(module, fresh), &step.outputs);
  at::Tensor loss = torch::zeros({});
  for (const at::Tensor& output : step.outputs)
    if (output.defined() && output.requires_grad())
      loss = loss + (output * torch::linspace(-1, 1.5, output.numel()).reshape(output.sizes())).sum();
  if (loss.requires_grad()) loss.backward();
  for (const at::Tensor& input : fresh)
    step.gradients.push_back(input.grad().defined() ? input.grad().clone() : at::Tensor());
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module->parameters()) {
    step.gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    if (parameter.grad().defined())
      parameter.sub_(parameter.grad(), 0.01);  // a replay must see the new values
    step.state.push_back(parameter.detach().clone());
  }
  for (const at::Tensor& buffer : module->buffers()) step.state.push_back(buffer.clone());
  return step;
}

void expect_same(const Tensors& actual, const Tensors& expected, const char* what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << what << " " << i;
    if (!actual[i].defined()) continue;
    EXPECT_EQ(actual[i].sizes(), expected[i].sizes()) << what << " " << i;
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << what << " " << i << "\n"
                                                      << actual[i] << "\nexpected\n"
                                                      << expected[i];
  }
}

int modules_checked = 0;

// Three training steps of a module and of its compiled twin match bit for bit; no node of the graph writes.
template <class Make, class Call>
void expect_module(const std::string& name, const Make& make, const Tensors& inputs, const Call& call,
                   bool training = true) {
  SCOPED_TRACE(name);
  torch::manual_seed(7);
  auto plain = make();
  torch::manual_seed(7);
  auto original = make();
  auto fast = compile(original);
  plain->train(training);
  fast->train(training);
  for (int number = 0; number < 3; ++number) {
    SCOPED_TRACE("step " + std::to_string(number));
    const Step expected = step_of(plain, call, inputs, number);
    const Step actual = step_of(fast, call, inputs, number);
    expect_same(actual.outputs, expected.outputs, "output");
    expect_same(actual.gradients, expected.gradients, "gradient");
    expect_same(actual.state, expected.state, "state");
  }
  ASSERT_EQ(entry_count(*fast), 1u);
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u);
  EXPECT_EQ(count_writes(compiled_entry(*fast, 0).joint(0).graph), 0u)
      << to_text(compiled_entry(*fast, 0).joint(0).graph);
  EXPECT_EQ(fast->named_parameters().keys(), plain->named_parameters().keys());
  for (const at::Tensor& parameter : original->parameters()) EXPECT_FALSE(is_fake(parameter));
  ++modules_checked;
}

const auto on_first = [](auto& module, const Tensors& in) { return module->forward(in[0]); };
const auto on_two = [](auto& module, const Tensors& in) { return module->forward(in[0], in[1]); };
const auto on_three = [](auto& module, const Tensors& in) { return module->forward(in[0], in[1], in[2]); };

at::Tensor leaf(at::IntArrayRef sizes) { return torch::randn(sizes).set_requires_grad(true); }
at::Tensor tokens(std::int64_t limit, at::IntArrayRef sizes) { return torch::randint(0, limit, sizes); }

TEST(CompiledModule, LinearAndConvolutions) {
  torch::manual_seed(1);
  expect_module(
      "Linear", [] { return nn::Linear(4, 3); }, {leaf({5, 4})}, on_first);
  expect_module(
      "Bilinear", [] { return nn::Bilinear(4, 3, 2); }, {leaf({5, 4}), leaf({5, 3})}, on_two);
  expect_module(
      "Conv1d", [] { return nn::Conv1d(nn::Conv1dOptions(3, 4, 3).padding(1)); }, {leaf({2, 3, 8})},
      on_first);
  expect_module(
      "Conv2d", [] { return nn::Conv2d(nn::Conv2dOptions(4, 4, 3).stride(2).groups(2)); },
      {leaf({2, 4, 8, 8})}, on_first);
  expect_module(
      "Conv3d", [] { return nn::Conv3d(nn::Conv3dOptions(2, 3, 2)); }, {leaf({2, 2, 4, 4, 4})}, on_first);
  expect_module(
      "ConvTranspose2d", [] { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(3, 2, 3).stride(2)); },
      {leaf({2, 3, 4, 4})}, on_first);
}

TEST(CompiledModule, Normalizations) {
  torch::manual_seed(2);
  expect_module(
      "BatchNorm1d", [] { return nn::BatchNorm1d(4); }, {leaf({6, 4})}, on_first);
  expect_module(
      "BatchNorm2d", [] { return nn::BatchNorm2d(3); }, {leaf({2, 3, 4, 4})}, on_first);
  expect_module(
      "BatchNorm2d, evaluated", [] { return nn::BatchNorm2d(3); }, {leaf({2, 3, 4, 4})}, on_first,
      /*training=*/false);
  expect_module(
      "InstanceNorm2d", [] { return nn::InstanceNorm2d(nn::InstanceNorm2dOptions(3).affine(true)); },
      {leaf({2, 3, 4, 4})}, on_first);
  expect_module(
      "LayerNorm",
      [] {
        return nn::LayerNorm(nn::LayerNormOptions({4, 5}));
      },
      {leaf({2, 4, 5})}, on_first);
  expect_module(
      "GroupNorm", [] { return nn::GroupNorm(nn::GroupNormOptions(2, 4)); }, {leaf({2, 4, 5})}, on_first);
  expect_module(
      "LocalResponseNorm", [] { return nn::LocalResponseNorm(2); }, {leaf({2, 4, 5})}, on_first);
}

TEST(CompiledModule, Embeddings) {
  torch::manual_seed(3);
  expect_module(
      "Embedding", [] { return nn::Embedding(nn::EmbeddingOptions(9, 4).padding_idx(2)); },
      {tokens(9, {2, 5})}, on_first);
  for (const bool mean : {false, true})
    expect_module(
        mean ? "EmbeddingBag, mean" : "EmbeddingBag, sum",
        [mean] {
          nn::EmbeddingBagOptions options(9, 4);
          return mean ? nn::EmbeddingBag(options.mode(torch::kMean))
                      : nn::EmbeddingBag(options.mode(torch::kSum));
        },
        {tokens(9, {3, 4})}, on_first);
}

// Casts are nodes of the graph. A replay does not cast again, and casts made during the capture do not stay
// in the cache.
TEST(CompiledModule, Autocast) {
  torch::manual_seed(5);
  nn::Sequential plain(nn::Linear(4, 8), nn::Softmax(1), nn::Linear(8, 4));
  nn::Sequential original = std::dynamic_pointer_cast<nn::SequentialImpl>(plain->clone());
  auto fast = compile(original);
  const at::Tensor x = torch::randn({3, 4});
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE(step);
    at::Tensor expected, actual, eager_after;
    {
      const AutocastScope casts(at::kCPU, at::kBFloat16);
      expected = plain->forward(x);
      original->forward(x);  // casts the weights for real before they are captured
      actual = fast->forward(x);
      eager_after = original->forward(x);
    }
    EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
    expect_same({actual, eager_after}, {expected, expected}, "output");
    expected.sum().backward();
    actual.sum().backward();
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(original->parameters()[i].grad(), plain->parameters()[i].grad())) << i;
    }
  }
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u);
  EXPECT_EQ(fast->forward(x).scalar_type(), at::kFloat);
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 2u);
}

TEST(CompiledModule, Recurrent) {
  torch::manual_seed(4);
  expect_module(
      "LSTM", [] { return nn::LSTM(nn::LSTMOptions(4, 5).num_layers(2).bidirectional(true)); },
      {leaf({3, 2, 4})}, on_first);
  expect_module(
      "GRU", [] { return nn::GRU(nn::GRUOptions(4, 5).batch_first(true)); }, {leaf({2, 3, 4})}, on_first);
  expect_module(
      "RNN", [] { return nn::RNN(nn::RNNOptions(4, 5)); }, {leaf({3, 2, 4})}, on_first);
  expect_module(
      "LSTMCell", [] { return nn::LSTMCell(4, 5); }, {leaf({2, 4}), leaf({2, 5}), leaf({2, 5})},
      [](auto& module, const Tensors& in) { return module->forward(in[0], std::make_tuple(in[1], in[2])); });
  expect_module(
      "GRUCell", [] { return nn::GRUCell(4, 5); }, {leaf({2, 4}), leaf({2, 5})}, on_two);
}

TEST(CompiledModule, Attention) {
  torch::manual_seed(5);
  expect_module(
      "MultiheadAttention",
      [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2).dropout(0.2)); },
      {leaf({5, 2, 8}), leaf({4, 2, 8})},
      [](auto& module, const Tensors& in) { return module->forward(in[0], in[1], in[1]); });
  expect_module(
      "attention to itself", [] { return nn::MultiheadAttention(8, 2); }, {leaf({5, 2, 8})},
      [](auto& module, const Tensors& in) { return module->forward(in[0], in[0], in[0]); });
  expect_module(
      "TransformerEncoderLayer",
      [] {
        return nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16));
      },
      {leaf({5, 2, 8})}, on_first);
  expect_module(
      "TransformerDecoderLayer",
      [] {
        return nn::TransformerDecoderLayer(nn::TransformerDecoderLayerOptions(8, 2).dim_feedforward(16));
      },
      {leaf({5, 2, 8}), leaf({4, 2, 8})}, on_two);
}

TEST(CompiledModule, DropoutDrawsAsThePlainModule) {
  torch::manual_seed(6);
  expect_module(
      "Dropout", [] { return nn::Dropout(0.3); }, {leaf({5, 4})}, on_first);
  expect_module(
      "Dropout in place",
      [] { return nn::Sequential(nn::Linear(4, 4), nn::Dropout(nn::DropoutOptions(0.3).inplace(true))); },
      {leaf({5, 4})}, on_first);
  expect_module(
      "Dropout2d", [] { return nn::Dropout2d(0.3); }, {leaf({2, 5, 3, 3})}, on_first);
  expect_module(
      "AlphaDropout", [] { return nn::AlphaDropout(0.3); }, {leaf({5, 4})}, on_first);
  expect_module(
      "RReLU", [] { return nn::RReLU(); }, {leaf({5, 4})}, on_first);
}

TEST(CompiledModule, Activations) {
  torch::manual_seed(7);
  const auto check = [](const char* name, const auto& make) {
    expect_module(name, make, {leaf({3, 4})}, on_first);
  };
  check("ReLU in place", [] { return nn::Sequential(nn::Linear(4, 4), nn::ReLU(nn::ReLUOptions(true))); });
  check("GELU", [] { return nn::GELU(); });
  check("SiLU", [] { return nn::SiLU(); });
  check("Mish", [] { return nn::Mish(); });
  check("ELU", [] { return nn::ELU(); });
  check("SELU", [] { return nn::SELU(); });
  check("Softplus", [] { return nn::Softplus(); });
  check("PReLU", [] { return nn::PReLU(); });
  check("LogSoftmax", [] { return nn::LogSoftmax(-1); });
  check("LeakyReLU", [] { return nn::LeakyReLU(); });
}

TEST(CompiledModule, PoolingAndShapes) {
  torch::manual_seed(8);
  const auto check = [](const char* name, const auto& make) {
    expect_module(name, make, {leaf({2, 4, 8, 8})}, on_first);
  };
  check("MaxPool2d", [] { return nn::MaxPool2d(2); });
  check("AvgPool2d", [] { return nn::AvgPool2d(2); });
  check("AdaptiveAvgPool2d", [] { return nn::AdaptiveAvgPool2d(3); });
  check("LPPool2d", [] { return nn::LPPool2d(nn::LPPool2dOptions(2, 2)); });
  check("ReflectionPad2d", [] { return nn::ReflectionPad2d(1); });
  check("Upsample", [] {
    return nn::Upsample(nn::UpsampleOptions()
                            .scale_factor(std::vector<double>{2.0, 2.0})
                            .mode(torch::kBilinear)
                            .align_corners(false));
  });
  check("PixelShuffle", [] { return nn::PixelShuffle(2); });
  check("Unfold", [] { return nn::Unfold(nn::UnfoldOptions({2, 2})); });
  check("Flatten", [] { return nn::Flatten(); });
}

TEST(CompiledModule, Losses) {
  torch::manual_seed(9);
  const at::Tensor x = leaf({4, 6}), y = torch::rand({4, 6});
  expect_module(
      "CrossEntropyLoss", [] { return nn::CrossEntropyLoss(); }, {x, tokens(6, {4})}, on_two);
  expect_module(
      "NLLLoss", [] { return nn::NLLLoss(); }, {x, tokens(6, {4})}, on_two);
  expect_module(
      "MSELoss", [] { return nn::MSELoss(); }, {x, y}, on_two);
  expect_module(
      "SmoothL1Loss", [] { return nn::SmoothL1Loss(); }, {x, y}, on_two);
  expect_module(
      "BCEWithLogitsLoss", [] { return nn::BCEWithLogitsLoss(); }, {x, y}, on_two);
  expect_module(
      "KLDivLoss", [] { return nn::KLDivLoss(nn::KLDivLossOptions(torch::kBatchMean)); }, {x, y}, on_two);
  expect_module(
      "TripletMarginLoss", [] { return nn::TripletMarginLoss(); }, {x, y, leaf({4, 6})}, on_three);
  expect_module(
      "CosineSimilarity", [] { return nn::CosineSimilarity(); }, {x, y}, on_two);
}

// The same weight embeds and projects, registered under two names.
struct TiedImpl : nn::Module {
  TiedImpl() : embed(register_module("embed", nn::Embedding(7, 4))) {
    head = register_parameter("head", embed->weight);
  }
  at::Tensor forward(const at::Tensor& input) { return torch::linear(embed->forward(input).tanh(), head); }
  nn::Embedding embed;
  at::Tensor head;
};
TORCH_MODULE(Tied);

// Writes a parameter without autograd, counts its calls in a buffer, returns a buffer and a view of it.
struct CountingImpl : nn::Module {
  CountingImpl() {
    weight = register_parameter("weight", torch::randn({4}));
    calls = register_buffer("calls", torch::zeros({2}));
  }
  std::tuple<at::Tensor, at::Tensor, std::tuple<at::Tensor, at::Tensor>> forward(const at::Tensor& input) {
    calls.select(0, 0).add_(1);
    const at::Tensor result = input * weight * calls.sum();
    calls.mul_(2);
    return {result, calls, {calls.select(0, 0), at::Tensor()}};
  }
  at::Tensor weight, calls;
};
TORCH_MODULE(Counting);

TEST(CompiledModule, TiedWeightsAndBuffers) {
  torch::manual_seed(10);
  expect_module(
      "tied", [] { return Tied(); }, {tokens(7, {2, 3})}, on_first);
  auto tied = compile(Tied());
  tied->forward(tokens(7, {2, 3}));
  EXPECT_EQ(state_of(*tied).names, std::vector<std::string>{"head"});
  EXPECT_EQ(state_of(*tied).same.at("embed.weight"), "head");
  expect_module(
      "counting", [] { return Counting(); }, {leaf({3, 4})}, on_first);
}

TEST(CompiledModule, ThirtyModulesAndMore) {
  EXPECT_GE(modules_checked, ::testing::GTEST_FLAG(filter) == "*" ? 50 : 0);
}

TEST(CompiledModule, InputsOfTheGraphCarryTheNamesOfTheModule) {
  nn::Sequential net(nn::Linear(4, 3), nn::BatchNorm1d(3));
  auto fast = compile(net);
  fast->forward(torch::randn({5, 4}));
  std::vector<std::string> names;
  for (const Placeholder& input : compiled_entry(*fast, 0).joint(0).graph.inputs) names.push_back(input.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean",
                                      "1.running_var", "1.num_batches_tracked", "args[0]", "tangents_1"}));
  EXPECT_EQ(state_of(*fast).parameters, 4u);
  EXPECT_EQ(fast->named_buffers().keys(), net->named_buffers().keys());
}

TEST(CompiledModule, TheLatestCaptureAsText) {
  nn::Sequential net(nn::Linear(4, 3));
  auto fast = compile(net);
  EXPECT_EQ(fast->captures(), 0u);
  EXPECT_EQ(fast->graph_text(), "");
  fast->forward(torch::randn({5, 4}));
  EXPECT_EQ(fast->captures(), 1u);
  EXPECT_EQ(fast->graph_text(), to_text(compiled_entry(*fast, 0).joint(0).graph));
  EXPECT_TRUE(has_text(fast->graph_text(), "args[0]: float32[5, 4]"));
  fast->forward(torch::randn({2, 4}));
  fast->forward(torch::randn({5, 4}));  // replayed
  EXPECT_EQ(fast->captures(), 2u);
  EXPECT_TRUE(has_text(fast->graph_text(), "args[0]: float32[2, 4]"));
}

TEST(CompiledModule, OtherCallsAreCapturedAgainOrRefused) {
  torch::manual_seed(11);
  nn::Sequential net(nn::Linear(4, 3), nn::Dropout(0.5));
  auto fast = compile(net);
  const at::Tensor x = torch::randn({5, 4});
  fast->forward(x);
  fast->eval();
  EXPECT_TRUE(torch::equal(fast->forward(x), net->forward(x)));
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 2u);
  fast->forward(torch::randn({2, 4}));
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 3u);
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(fast->forward(x).requires_grad());
  }
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 4u);

  auto once = compile(net, {.recapture = false});
  once->train();
  once->forward(x);
  EXPECT_TRUE(has_text(message_of<StateError>([&] {
                         once->forward(torch::randn({2, 4}));
                       }),
                       "args[0] has sizes [2, 4], in the capture [5, 4]"));
  once->eval();
  EXPECT_TRUE(
      has_text(message_of<StateError>([&] { once->forward(x); }), "the training flags of the submodules"));
  once->train();
  net->parameters()[0].set_requires_grad(false);
  EXPECT_TRUE(
      has_text(message_of<StateError>([&] { once->forward(x); }), "0.weight does not require a gradient"));
}

TEST(CompiledModule, HooksAndGradientsOfParametersStay) {
  nn::Linear layer(3, 2);
  int hooked = 0;
  layer->weight.register_hook([&](const at::Tensor&) { ++hooked; });
  layer->weight.mutable_grad() = torch::ones({2, 3});
  auto fast = compile(layer);
  const at::Tensor x = torch::ones({1, 3});
  fast->forward(x).sum().backward();
  EXPECT_EQ(hooked, 1);
  EXPECT_TRUE(torch::equal(layer->weight.grad(), torch::full({2, 3}, 2.)));
}

// Reads the values of a buffer.
struct LookingImpl : nn::Module {
  LookingImpl() { calls = register_buffer("calls", torch::zeros({})); }
  at::Tensor forward(const at::Tensor& input) { return calls.item<float>() > 0 ? input * 2 : input * 3; }
  at::Tensor calls;
};
TORCH_MODULE(Looking);

// Uses a tensor that requires a gradient and is not a parameter.
struct HidingImpl : nn::Module {
  at::Tensor forward(const at::Tensor& input) { return input * weight; }
  at::Tensor weight = torch::ones({3}).set_requires_grad(true);
};
TORCH_MODULE(Hiding);

struct WithHeadImpl : nn::Module {
  WithHeadImpl() { head = register_module("head", nn::Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) { return head->forward(x); }
  nn::Linear head{nullptr};
};
TORCH_MODULE(WithHead);

// Its graphs would go on computing with the old one.
TEST(CompiledModule, AReplacedSubmoduleIsAnError) {
  WithHead module;
  const auto fast = compile(module);
  const at::Tensor x = torch::randn({2, 4});
  EXPECT_TRUE(torch::equal(fast->forward(x), module->forward(x)));
  module->head = module->replace_module("head", nn::Linear(4, 4));
  EXPECT_TRUE(has_text(message_of<StateError>([&] { fast->forward(x); }), "compile the module again"));
  const auto again = compile(module);
  EXPECT_TRUE(torch::equal(again->forward(x), module->forward(x)));
}

TEST(CompiledModule, FailedCapturesLeaveTheModuleUnchanged) {
  Looking looking;
  auto fast = compile(looking);
  EXPECT_TRUE(has_text(message_of<DataDependentError>([&] { fast->forward(torch::ones({3})); }),
                       "aten::_local_scalar_dense"));
  EXPECT_FALSE(is_fake(looking->calls));
  EXPECT_TRUE(torch::equal(looking->forward(torch::ones({3})), torch::full({3}, 3.)));
  // LibTorch compares keys and values to check whether they are the same.
  auto attention = compile(nn::MultiheadAttention(4, 2));
  EXPECT_TRUE(
      has_text(message_of<DataDependentError>([&] {
                 attention->forward(torch::ones({3, 1, 4}), torch::ones({3, 1, 4}), torch::ones({3, 1, 4}));
               }),
               "aten::equal"));
  auto hiding = compile(Hiding());
  EXPECT_TRUE(has_text(message_of<StateError>([&] { hiding->forward(torch::ones({3})); }),
                       "register it as a parameter"));
}

}  // namespace compiled_module_test
}  // namespace penstock::graph
