// The transformer block that the benchmarks train. peer_block.py is the same in Python, with the same names
// and the same order of parameters.
#pragma once

#include <torch/torch.h>

#include <cmath>

namespace penstock::bench {

inline constexpr int kHeads = 4, kSequence = 64;

inline at::Tensor through_layer(torch::nn::Linear& layer, const at::Tensor& x) { return layer(x); }

struct BlockImpl : torch::nn::Module {
  // `through`: how linear layers are applied.
  using Through = at::Tensor (*)(torch::nn::Linear&, const at::Tensor&);

  explicit BlockImpl(int d, Through how = &through_layer)
      : ln1(register_module("ln1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})))),
        qkv(register_module("qkv", torch::nn::Linear(d, 3 * d))),
        proj(register_module("proj", torch::nn::Linear(d, d))),
        ln2(register_module("ln2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})))),
        fc1(register_module("fc1", torch::nn::Linear(d, 4 * d))),
        fc2(register_module("fc2", torch::nn::Linear(4 * d, d))),
        through(how) {}

  at::Tensor forward(at::Tensor x) {
    const auto rows = x.size(0), length = x.size(1), d = x.size(2);
    const auto parts =
        through(qkv, ln1(x)).view({rows, length, 3, kHeads, d / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const at::Tensor weights = torch::softmax(
        torch::matmul(parts[0], parts[1].transpose(-2, -1)) * std::pow(static_cast<double>(d / kHeads), -0.5),
        -1);
    x = x + through(proj, torch::matmul(weights, parts[2]).transpose(1, 2).reshape({rows, length, d}));
    return x + through(fc2, torch::gelu(through(fc1, ln2(x))));
  }

  torch::nn::LayerNorm ln1;
  torch::nn::Linear qkv, proj;
  torch::nn::LayerNorm ln2;
  torch::nn::Linear fc1, fc2;
  Through through;
};
TORCH_MODULE(Block);

}  // namespace penstock::bench
