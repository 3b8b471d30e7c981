// The modules of a traced stage: a tree with the names of the model's modules, which owns the stage's
// parameters and buffers.
//
//   const auto root = make_module_tree(pipe.modules, {"layers.1", "head"}, tensors);
//   root->named_parameters().keys();                  // "layers.1.weight", as in the model
//
// Parameters, buffers and submodules are in the order of the model. train() and eval() set the flags that
// choose between the traces of both modes. Thread safety: that of modules.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "penstock/pipeline/traced/pipe_state.h"

namespace penstock {

struct StageTensor {
  std::string name;  // in the model
  at::Tensor tensor;
  bool is_parameter = true;
};

struct ModuleTree {
  std::shared_ptr<torch::nn::Module> root;
  // One for each module of the model; null if the stage has nothing of it.
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
};

// The tree has the modules in `computing`, the owners of the tensors, and all of their parents.
ModuleTree make_module_tree(const std::vector<ModelModule>& model, const std::set<std::string>& computing,
                            const std::vector<StageTensor>& tensors);

}  // namespace penstock
