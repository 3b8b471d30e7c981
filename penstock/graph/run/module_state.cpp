#include "penstock/graph/run/module_state.h"

#include <unordered_map>

namespace penstock::graph {
namespace {

// named_parameters() copies the dictionary with all names; this is the dictionary itself.
struct OwnParameters : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

}  // namespace

void ModuleParts::add(const torch::nn::Module& module) {
  const auto add_tensors = [&](const torch::OrderedDict<std::string, at::Tensor>& named) {
    for (const auto& item : named)
      if (item.value().defined()) parts_.push_back(item.value().unsafeGetTensorImpl());
  };
  parts_.push_back(&module);
  add_tensors(OwnParameters::of(module));
  add_tensors(module.named_buffers(/*recurse=*/false));
  for (const auto& child : module.children()) add(*child);
}

ModuleState::ModuleState(const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::string> known;
  const auto add = [&](const torch::OrderedDict<std::string, at::Tensor>& named) {
    for (const auto& item : named) {
      if (!item.value().defined()) continue;
      const auto [entry, is_new] = known.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
      if (!is_new) {
        same.emplace(item.key(), entry->second);
        continue;
      }
      names.push_back(item.key());
      tensors.push_back(item.value());
    }
  };
  add(module.named_parameters());
  parameters = tensors.size();
  add(module.named_buffers());
}

}  // namespace penstock::graph
