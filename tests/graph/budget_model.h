// A small transformer with dropout, and its graph: for tests of what forward saves for backward.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/compile.h"
#include "penstock/graph/run/compiled_module_internals.h"

namespace penstock::graph::budget_model {

inline constexpr std::int64_t kWidth = 32, kHeads = 4, kRows = 4, kLength = 48;

struct FeedImpl : torch::nn::Module {
  FeedImpl()
      : up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Feed);

struct AttentionImpl : torch::nn::Module {
  AttentionImpl()
      : query(register_module("query", torch::nn::Linear(kWidth, kWidth))),
        key(register_module("key", torch::nn::Linear(kWidth, kWidth))),
        value(register_module("value", torch::nn::Linear(kWidth, kWidth))),
        output(register_module("output", torch::nn::Linear(kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](torch::nn::Linear& of) {
      return of(x).view({x.size(0), x.size(1), kHeads, -1}).transpose(1, 2);
    };
    const at::Tensor scores = torch::matmul(heads(query), heads(key).transpose(-2, -1)) * 0.25;
    const at::Tensor mixed =
        torch::matmul(torch::dropout(torch::softmax(scores, -1), 0.1, true), heads(value));
    return output(mixed.transpose(1, 2).reshape(x.sizes()));
  }
  torch::nn::Linear query, key, value, output;
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : first(register_module("first", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        attention(register_module("attention", Attention())),
        second(register_module("second", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        feed(register_module("feed", Feed())) {}
  at::Tensor forward(at::Tensor x) {
    x = x + attention->forward(first(x));
    return x + torch::dropout(feed->forward(second(x)), 0.1, true);
  }
  torch::nn::LayerNorm first;
  Attention attention;
  torch::nn::LayerNorm second;
  Feed feed;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int layers) {
    torch::manual_seed(3);
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < layers; ++i) blocks->push_back(Block());
    head = register_module("head", torch::nn::Linear(kWidth, 8));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::log_softmax(head(x), -1).select(-1, 2).neg().mean();
  }
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

inline at::Tensor input_of_model() {
  torch::manual_seed(5);
  return torch::randn({kRows, kLength, kWidth});
}

inline CompileOptions with_budget(const std::string& budget, std::vector<std::string> policy = {},
                                  bool explicit_states = true) {
  return {.activations = {.budget = budget, .policy = std::move(policy)},
          .explicit_random_states = explicit_states};
}

// The joint graph of the model, with its random states as arguments or not.
inline JointGraph joint_of_model(int layers, bool explicit_states = true) {
  Model model(layers);
  auto fast = compile(model, with_budget("1", {}, explicit_states));
  fast->forward(input_of_model());
  return compiled_entry(*fast, 0).joint(0);
}

}  // namespace penstock::graph::budget_model
