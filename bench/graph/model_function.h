// A transformer with its loss, and that as a function of its parameters and arguments: what the benchmarks
// capture.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <string>
#include <vector>

#include "bench/block.h"
#include "penstock/graph/run/module_state.h"
#include "penstock/graph/trace/analyze.h"
#include "penstock/graph/trace/capture.h"

namespace penstock::bench {

struct ModelImpl : torch::nn::Module {
  ModelImpl(int width, int layers) {
    torch::manual_seed(0);
    for (int i = 0; i < layers; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(width)));
  }
  at::Tensor forward(at::Tensor x, const at::Tensor& target) {
    for (Block& block : blocks) x = block->forward(x);
    return torch::mse_loss(x, target);
  }
  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

// The inputs are the parameters, then the two arguments.
struct ModelFunction {
  ModelFunction(const Model& of, const at::Tensor& x, const at::Tensor& target) : model(of), state(*of) {
    inputs.assign(state.tensors.begin(), state.tensors.end());
    inputs.emplace_back(x);
    inputs.emplace_back(target);
    const std::size_t found = state.tensors.size();
    convention = {found, state.names};
    function = [model = of, found](const graph::Values& in) mutable -> graph::Values {
      return {model->forward(in[found].toTensor(), in[found + 1].toTensor())};
    };
  }
  Model model;
  graph::ModuleState state;
  graph::Values inputs;
  graph::Convention convention;
  graph::Function function;
};

}  // namespace penstock::bench
