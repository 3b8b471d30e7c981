// Names that the snippets of docs and headers presume. Nothing here is defined: snippets are compiled, never
// linked.
#pragma once

#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/penstock.h"

namespace presumed {

using namespace penstock;
using torch::Tensor;

// A model with blocks, as the snippets use it.
struct BlockImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x);
};
TORCH_MODULE(Block);
struct ModelImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x);
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Model);
struct Batch {
  at::Tensor x, y;
};

extern comm::World world;
extern comm::Group group;
extern comm::MeshGroups mesh;
extern Model model;
extern Block block;
extern at::Tensor x, y, w, loss_value, activations, gradients, tokens, documents, targets, logits;
extern std::vector<Batch> batches;
extern std::vector<optim::NamedParameter> named;
extern optim::AdamW optimizer;
extern schedule::Schedule schedule;
extern std::string csv, folder;
at::Tensor mse_loss(const at::Tensor& output, const at::Tensor& target);

}  // namespace presumed
