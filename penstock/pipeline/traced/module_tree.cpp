#include "penstock/pipeline/traced/module_tree.h"

#include <map>
#include <utility>

namespace penstock {
namespace {

// Stands for a module of the model, of which it has the kind as its name.
class TracedModule final : public torch::nn::Module {
 public:
  explicit TracedModule(std::string kind) : Module(std::move(kind)) {}
};

std::string last_name(const std::string& path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string::npos ? path : path.substr(dot + 1);
}

}  // namespace

ModuleTree make_module_tree(const std::vector<ModelModule>& model, const std::set<std::string>& computing,
                            const std::vector<StageTensor>& tensors) {
  std::set<std::string> wanted = {""};
  const auto want = [&](std::string path) {
    while (wanted.insert(path).second) path = graph::owner_of(path);
  };
  for (const std::string& path : computing) want(path);
  for (const StageTensor& tensor : tensors) want(graph::owner_of(tensor.name));
  ModuleTree tree;
  std::map<std::string, std::shared_ptr<torch::nn::Module>> made;
  for (const ModelModule& module : model) {
    if (!wanted.contains(module.path)) {
      tree.modules.push_back(nullptr);
      continue;
    }
    auto twin = std::make_shared<TracedModule>(module.kind);
    if (module.path.empty())
      tree.root = twin;
    else
      made.at(graph::owner_of(module.path))->register_module(last_name(module.path), twin);
    made.emplace(module.path, twin);
    tree.modules.push_back(std::move(twin));
  }
  for (const StageTensor& tensor : tensors) {
    torch::nn::Module& owner = *made.at(graph::owner_of(tensor.name));
    if (tensor.is_parameter)
      owner.register_parameter(last_name(tensor.name), tensor.tensor, tensor.tensor.requires_grad());
    else
      owner.register_buffer(last_name(tensor.name), tensor.tensor);
  }
  // Parents first: train() also sets the flags of what is below.
  for (std::size_t i = 0; i < model.size(); ++i)
    if (tree.modules[i]) tree.modules[i]->train(model[i].training);
  return tree;
}

}  // namespace penstock
