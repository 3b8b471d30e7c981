// A small transformer written as for one process, its parallel plans, and three steps of training.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/tensor_parallel.h"

namespace penstock::test {

namespace nn = torch::nn;

constexpr std::int64_t kVocabulary = 30, kWidth = 16, kHeads = 4, kTokens = 6, kBatch = 4;

// Numbers of heads and widths are those of the whole model.
struct AttentionImpl : nn::Module {
  AttentionImpl() {
    wq = register_module("wq", nn::Linear(kWidth, kWidth));
    wk = register_module("wk", nn::Linear(kWidth, kWidth));
    wv = register_module("wv", nn::Linear(kWidth, kWidth));
    wo = register_module("wo", nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& y) {
      return y.view({y.size(0), y.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const at::Tensor q = heads(wq(x)), k = heads(wk(x)), v = heads(wv(x));
    const at::Tensor scores = at::softmax(q.matmul(k.transpose(2, 3)) / 2.0, -1);
    const at::Tensor mixed = scores.matmul(v).transpose(1, 2);
    return wo(mixed.reshape({mixed.size(0), mixed.size(1), kWidth}));
  }
  nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
};
TORCH_MODULE(Attention);

struct BlockImpl : nn::Module {
  BlockImpl() {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention", Attention());
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + attention(norm1(x));
    return h + down(at::gelu(up(norm2(h))));
  }
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  Attention attention{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct ModelImpl : nn::Module {
  ModelImpl() {
    embed = register_module("embed", nn::Embedding(kVocabulary, kWidth));
    blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < 2; ++i) blocks->push_back(Block());
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    head = register_module("head", nn::Linear(nn::LinearOptions(kWidth, kVocabulary).bias(false)));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embed(tokens);
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head(norm(x));
  }
  nn::Embedding embed{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

inline Model make_model(at::Device device = at::kCPU) {
  torch::manual_seed(5);
  Model model;
  model->to(device, at::kDouble);
  return model;
}

inline at::Tensor tokens_of(int step) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step) + 1);
  return at::randint(0, kVocabulary, {kBatch, kTokens}, generator, at::TensorOptions(at::kLong));
}

struct Training {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> parameters;
};

// Three steps of AdamW. `place` puts tokens and targets on the mesh.
inline Training train(Model model, const std::function<at::Tensor(const at::Tensor&)>& place) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  Training result;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor tokens = tokens_of(step);
    const at::Tensor inputs = place(tokens), targets = place(tokens.roll(1, 1).contiguous());
    optimizer.zero_grad();
    const at::Tensor logits = model->forward(inputs);
    const at::Tensor loss = nn::functional::cross_entropy(logits.reshape({kBatch * kTokens, kVocabulary}),
                                                          targets.reshape({kBatch * kTokens}));
    loss.backward();
    optimizer.step();
    result.losses.push_back((is_dtensor(loss) ? full_tensor(loss.detach()) : loss).item<double>());
  }
  for (const auto& item : model->named_parameters())
    result.parameters[item.key()] =
        is_dtensor(item.value()) ? full_tensor(item.value().detach()) : item.value().detach().clone();
  return result;
}

using Plan = std::vector<std::pair<std::string, ParallelStylePtr>>;

inline Plan tensor_plan() {
  return {{"embed", rowwise_parallel()},
          {"blocks.*.attention.w[qkv]", colwise_parallel()},
          {"blocks.*.attention.wo", rowwise_parallel()},
          {"blocks.*.up", colwise_parallel()},
          {"blocks.*.down", rowwise_parallel()},
          {"head", colwise_parallel()}};
}

inline Plan sequence_plan() {
  return {{"embed", rowwise_parallel({.output = Shard{1}})},
          {"blocks.*.norm?", sequence_parallel()},
          {"blocks.*.attention.w[qkv]", colwise_parallel()},
          {"blocks.*.attention.wo", rowwise_parallel({.output = Shard{1}})},
          {"blocks.*.up", colwise_parallel()},
          {"blocks.*.down", rowwise_parallel({.output = Shard{1}})},
          {"norm", sequence_parallel()},
          {"head", colwise_parallel()}};
}

}  // namespace penstock::test
