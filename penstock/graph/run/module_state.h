// The tensors of a module as a list: parameters, then buffers, each once, with the names they go by.
//
//   const ModuleState state(*model);
//   state.names[0];                  // "layers.0.weight"
//   state.same["head.weight"];       // "embed.weight": the same tensor, registered twice
//
// Thread rule: a value.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace penstock::graph {

struct ModuleState {
  ModuleState() = default;
  explicit ModuleState(const torch::nn::Module& module);

  std::vector<std::string> names;           // qualified, parameters first
  std::vector<at::Tensor> tensors;          // as many; the module's own
  std::size_t parameters = 0;               // how many of them
  std::map<std::string, std::string> same;  // further name of a tensor -> its name in `names`
};

}  // namespace penstock::graph
