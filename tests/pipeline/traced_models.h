// Whole models that pipelines are traced from: skips, cross attention, two inputs, ties, buffers, and the
// project's own transformer.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/module_scope.h"
#include "penstock/trace_pipeline.h"
#include "penstock/transformer.h"
#include "tests/graph/random_net.h"
#include "tests/models/small_model.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock::test {

struct TracedModel {
  std::string name;
  // The same values each time it is made.
  std::function<StageModule()> module;
  std::function<Batch(int step, int microbatches)> batch;
  PipelineLoss loss;
  std::function<PipeSplit(int stages)> split = [](int stages) { return PipeSplit::into(stages); };
  bool tied = false;
  bool has_buffers = false;
};

// Cuts before the layers "PREFIX0", "PREFIX1", ... so that every stage has some.
inline PipeSplit evenly(const std::string& prefix, int layers, int stages) {
  std::vector<SplitAt> splits;
  for (int stage = 1; stage < stages; ++stage)
    splits.push_back({prefix + std::to_string(stage * layers / stages), SplitPoint::Before});
  return PipeSplit::at(std::move(splits));
}

inline constexpr int kTracedLayers = 8;

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (int i = 0; i < kTracedLayers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), Block(i)));
  }
  std::vector<Block> layers;
};

// Like a U-Net: what the first half computes is used by the second, in reverse order.
struct SkipNetImpl : LayersImpl {
  at::Tensor forward(at::Tensor x) {
    std::vector<at::Tensor> down;
    for (int i = 0; i < kTracedLayers / 2; ++i) {
      x = layers[static_cast<std::size_t>(i)]->forward(x);
      down.push_back(x);
    }
    for (int i = kTracedLayers / 2; i < kTracedLayers; ++i) {
      x = layers[static_cast<std::size_t>(i)]->forward(x + down.back() * 0.5);
      down.pop_back();
    }
    return x;
  }
};

// Every later layer attends to what the first one made, and to the keyword argument.
struct CrossAttentionImpl : LayersImpl {
  at::Tensor forward(at::Tensor x, const Tree& kwargs) {
    const at::Tensor memory = layers[0]->forward(x);
    at::Tensor h = memory;
    for (int i = 1; i < kTracedLayers; ++i) {
      const at::Tensor scores = torch::matmul(h, memory.t()) * 0.3;
      h = layers[static_cast<std::size_t>(i)]->forward(torch::matmul(torch::softmax(scores, -1), memory) *
                                                       kwargs["gain"].tensor());
    }
    return h;
  }
};

// Encoder and decoder: the second input is first used in the middle, the first one at the end again.
struct EncoderDecoderImpl : LayersImpl {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& source, const at::Tensor& target) {
    at::Tensor encoded = source, decoded = target;
    for (int i = 0; i < kTracedLayers / 2; ++i)
      encoded = layers[static_cast<std::size_t>(i)]->forward(encoded);
    for (int i = kTracedLayers / 2; i < kTracedLayers; ++i)
      decoded = layers[static_cast<std::size_t>(i)]->forward(decoded + 0.2 * encoded);
    return {decoded + 0.1 * source, encoded};
  }
};

// A head whose weight is that of the embedding: one tensor under two names.
struct SharedHeadImpl : torch::nn::Module {
  explicit SharedHeadImpl(const at::Tensor& shared) { weight = register_parameter("weight", shared); }
  at::Tensor forward(const at::Tensor& x) {
    const ModuleScope scope(*this);
    return torch::linear(x, weight);
  }
  at::Tensor weight;
};

// Tokens; the embedding is also the head.
struct TiedNetImpl : LayersImpl {
  TiedNetImpl() {
    embed = register_module("embed", torch::nn::Embedding(11, kWidth));
    {
      const at::NoGradGuard no_grad;
      embed->weight.copy_(at::randn({11, kWidth}, at::detail::createCPUGenerator(9)));
    }
    head = register_module("head", std::make_shared<SharedHeadImpl>(embed->weight));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor h = embed->forward(tokens);
    for (Block& layer : layers) h = layer->forward(h);
    return head->forward(h);
  }
  torch::nn::Embedding embed{nullptr};
  std::shared_ptr<SharedHeadImpl> head;
};

// A small ResNet: convolutions, batch norm with its buffers, activations in place, channels-last memory.
struct ResidualImpl : torch::nn::Module {
  explicit ResidualImpl(int number) {
    conv =
        register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    const at::NoGradGuard no_grad;
    conv->weight.copy_(values({4, 4, 3, 3}, 600 + number) * 0.2);
  }
  at::Tensor forward(const at::Tensor& x) {
    const ModuleScope scope(*this);
    return norm->forward(conv->forward(x)).relu_() + x;
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
};
TORCH_MODULE(Residual);

struct SmallResNetImpl : torch::nn::Module {
  SmallResNetImpl() {
    for (int i = 0; i < kTracedLayers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), Residual(i)));
    head = register_module("head", torch::nn::Linear(4, 3));
    const at::NoGradGuard no_grad;
    head->weight.copy_(values({3, 4}, 700));
    head->bias.zero_();
  }
  at::Tensor forward(at::Tensor x) {
    x = x.contiguous(at::MemoryFormat::ChannelsLast);
    for (Residual& layer : layers) x = layer->forward(x);
    return head->forward(x.flatten(2).mean(-1));
  }
  std::vector<Residual> layers;
  torch::nn::Linear head{nullptr};
};

template <class Module, class... Args>
std::function<StageModule()> maker(Args... args) {
  return [args...] { return StageModule(std::make_shared<Module>(args...)); };
}

inline PipelineLoss sum_of_squares() {
  return PipelineLoss([](const Tree& output, const Tree&) {
    at::Tensor sum;
    for (const at::Tensor& tensor : tensors_of(output)) {
      const at::Tensor one = tensor.pow(2).sum();
      sum = sum.defined() ? sum + one : one;
    }
    return sum;
  });
}

inline std::vector<TracedModel> traced_models() {
  std::vector<TracedModel> all;
  const auto by_layers = [](int stages) { return evenly("layer", kTracedLayers, stages); };
  const auto plain = [](int step, int m) { return plain_batch(step, 2 * m); };
  all.push_back({"skips", maker<SkipNetImpl>(), plain, square_loss(), by_layers});
  all.push_back({"cross attention", maker<CrossAttentionImpl>(),
                 [](int step, int m) {
                   Batch batch = plain_batch(step, 2 * m);
                   batch.kwargs = Tree::dict({{"gain", values({2 * m, 1}, 5 + step)}});
                   return batch;
                 },
                 square_loss(), by_layers});
  all.push_back({"encoder and decoder", maker<EncoderDecoderImpl>(),
                 [](int step, int m) {
                   Batch batch = plain_batch(step, 2 * m);
                   batch.args = Tree::tuple({batch.args[0], values({2 * m, kWidth}, 50 + step)});
                   return batch;
                 },
                 sum_of_squares(), by_layers});
  TracedModel tied{"tied embedding", maker<TiedNetImpl>(),
                   [](int step, int m) {
                     return Batch{Tree::tuple({at::arange(2 * m).mul(step + 3).remainder(11)}),
                                  {},
                                  Tree(at::zeros({2 * m}))};
                   },
                   sum_of_squares(), by_layers};
  tied.tied = true;
  all.push_back(tied);
  TracedModel residual{
      "residual", maker<SmallResNetImpl>(),
      [](int step, int m) {
        return Batch{Tree::tuple({values({2 * m, 4, 5, 6}, 40 + step)}), {}, values({2 * m, 3}, 60 + step)};
      },
      square_loss(), by_layers};
  residual.has_buffers = true;
  all.push_back(residual);
  all.push_back({"transformer",
                 [] {
                   auto options = models::test::small();
                   options.layers = kTracedLayers;
                   models::TransformerStage model = models::test::made(options, at::kFloat);
                   return StageModule([model](at::Tensor tokens) mutable { return model->forward(tokens); },
                                      {model.ptr()});
                 },
                 [](int step, int m) {
                   const auto options = models::test::small();
                   return Batch{Tree::tuple({models::test::tokens_for(options, 2 * m, 5,
                                                                      3 + static_cast<std::uint64_t>(step))}),
                                {},
                                Tree(at::zeros({2 * m}))};
                 },
                 sum_of_squares()});
  return all;
}

// ---- stages without a schedule ----

// All stages of a pipe in one process.
struct Stages {
  explicit Stages(const Pipe& pipe) {
    for (int stage = 0; stage < pipe.stages(); ++stage) all.push_back(stage_module(pipe, stage, at::kCPU));
  }
  // For models without values that skip stages.
  Tree forward(const Tree& args, const Tree& kwargs = {}) const {
    Tree value = args;
    for (const StageModule& stage : all) value = stage.forward(value, kwargs);
    return value;
  }
  at::Tensor operator()(const at::Tensor& x, const Tree& kwargs = {}) const {
    return forward(Tree::tuple({x}), kwargs).tensor();
  }
  void train(bool on) const {
    for (const StageModule& stage : all) stage.modules()[0]->train(on);
  }

  std::vector<StageModule> all;
};

// Of width 4, the same values for the same number.
inline torch::nn::Linear linear(int number) {
  torch::nn::Linear made(4, 4);
  const at::NoGradGuard no_grad;
  made->weight.copy_(values({4, 4}, 10 + number));
  made->bias.copy_(values({4}, 20 + number));
  return made;
}

inline TracedModel random_model(std::uint64_t seed) {
  TracedModel model;
  model.name = "random model " + std::to_string(seed);
  model.batch = [](int step, int m) {
    return Batch{Tree::tuple({values({2 * m, kNetWidth}, 7 + step), values({2 * m, kNetWidth}, 17 + step)}),
                 {},
                 values({2 * m, kNetWidth}, 70 + step)};
  };
  model.loss = square_loss();
  model.split = [](int) { return PipeSplit::at_marks(); };
  return model;
}

}  // namespace penstock::test
