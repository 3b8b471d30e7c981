// The tensors of a module as a list: parameters, then buffers, each once, with their names.
//
//   const ModuleState state(*model);
//   state.names[0];                  // "layers.0.weight"
//   state.same["head.weight"];       // "embed.weight": the same tensor, registered twice
//
// Which modules and tensors a module consists of, to notice when one of them is replaced:
//
//   const ModuleParts before(*model);
//   model->head = model->replace_module("head", torch::nn::Linear(8, 8));
//   ModuleParts(*model) == before;   // false
//
// Thread safety: that of a value type.
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
  std::vector<at::Tensor> tensors;          // one for each name; the module's own tensors
  std::size_t parameters = 0;               // how many of them are parameters
  std::map<std::string, std::string> same;  // additional name of a tensor -> its name in `names`
};

// By address, so what is compared must still be alive. Cheap: it builds no names.
class ModuleParts {
 public:
  ModuleParts() = default;
  explicit ModuleParts(const torch::nn::Module& module) { add(module); }
  // Adds the module, its parameters and buffers, and its submodules.
  void add(const torch::nn::Module& module);
  bool operator==(const ModuleParts&) const = default;

 private:
  std::vector<const void*> parts_;
};

}  // namespace penstock::graph
