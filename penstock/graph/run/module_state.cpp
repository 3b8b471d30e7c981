#include "penstock/graph/run/module_state.h"

#include <unordered_map>

namespace penstock::graph {

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
