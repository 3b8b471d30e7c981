#include "penstock/graph/stages/module_recorder.h"

#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <utility>

#include "penstock/graph/stages/forward_trace.h"

namespace penstock::graph {

std::string owner_of(const std::string& tensor_name) {
  const std::size_t dot = tensor_name.rfind('.');
  return dot == std::string::npos ? std::string() : tensor_name.substr(0, dot);
}

bool is_inside(const std::string& path, const std::string& module) {
  if (module.empty() || path == module) return true;
  return path.size() > module.size() && path.starts_with(module) && path[module.size()] == '.';
}

ModuleRecorder::ModuleRecorder(const std::vector<std::shared_ptr<torch::nn::Module>>& roots,
                               const Graph& graph)
    : graph_(graph) {
  for (std::size_t i = 0; i < roots.size(); ++i)
    for (const auto& item :
         roots[i]->named_modules(roots.size() > 1 ? std::to_string(i) : std::string(), true))
      path_of_.emplace(item.value().get(), item.key());
}

void ModuleRecorder::enter(const torch::nn::Module& module) {
  thrown_in_ = nullptr;  // the forward has caught it
  const auto known = path_of_.find(&module);
  // A module that the model has not registered counts as a part of the one that calls it.
  open_.push_back(known != path_of_.end() ? &known->second : open_.empty() ? &root_ : open_.back());
  events_.push_back({graph_.nodes.size(), open_.back()});
}

void ModuleRecorder::leave() noexcept {
  if (!thrown_in_ && std::uncaught_exceptions() > exceptions_before_) thrown_in_ = open_.back();
  open_.pop_back();
  events_.push_back({graph_.nodes.size(), open_.empty() ? &root_ : open_.back()});
}

std::vector<std::string> ModuleRecorder::paths(
    std::size_t found, const std::map<std::size_t, std::vector<std::string>>& aliases) const {
  struct Owners {
    std::vector<std::string> modules;  // one for each name
    std::size_t uses = 0;
  };
  std::vector<Owners> inputs(found);
  std::vector<Owners*> owners(graph_.values.size(), nullptr);
  for (std::size_t i = 0; i < found; ++i) {
    const auto several = aliases.find(i);
    if (several == aliases.end()) {
      inputs[i].modules.push_back(owner_of(graph_.inputs[i].name));
    } else {
      for (const std::string& name : several->second) inputs[i].modules.push_back(owner_of(name));
    }
    owners[index_of(graph_.inputs[i].value)] = &inputs[i];
  }
  std::vector<std::string> result;
  result.reserve(graph_.nodes.size());
  const std::string* module = &root_;
  std::size_t event = 0;
  for (std::size_t node = 0; node < graph_.nodes.size(); ++node) {
    while (event < events_.size() && events_[event].node <= node) module = events_[event++].module;
    std::string innermost = *module;
    for_each_value(graph_.nodes[node].arguments, [&](ValueId value) {
      Owners* of = owners[index_of(value)];
      if (!of) return;
      std::vector<const std::string*> inside;
      for (const std::string& owner : of->modules)
        if (is_inside(owner, *module)) inside.push_back(&owner);
      const std::size_t use = of->uses++;
      if (inside.empty()) return;
      const std::string& owner = *inside[std::min(use, inside.size() - 1)];
      if (owner.size() > innermost.size()) innermost = owner;
    });
    result.push_back(std::move(innermost));
  }
  return result;
}

// -------------------------------------------------------------------------------------------------------
// torch::nn::Sequential

namespace {

// Stands for a module of a Sequential.
struct ReportingModule : torch::nn::Module {
  explicit ReportingModule(torch::nn::AnyModule wrapped) : original(std::move(wrapped)) {}
  at::Tensor forward(at::Tensor x) {
    const ModuleScope scope(*original.ptr());
    return original.any_forward(std::move(x)).get<at::Tensor>();
  }
  torch::nn::AnyModule original;
};

}  // namespace

struct SequentialScopes::Replaced {
  std::shared_ptr<torch::nn::SequentialImpl> sequential;
  std::vector<torch::nn::AnyModule> modules;
};

SequentialScopes::SequentialScopes(const std::vector<std::shared_ptr<torch::nn::Module>>& roots) {
  for (const auto& root : roots)
    for (const auto& module : root->modules(true)) {
      auto sequential = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(module);
      if (!sequential || std::any_of(replaced_.begin(), replaced_.end(),
                                     [&](const Replaced& known) { return known.sequential == sequential; }))
        continue;
      replaced_.push_back(
          {sequential, std::vector<torch::nn::AnyModule>(sequential->begin(), sequential->end())});
      for (torch::nn::AnyModule& each : *sequential)
        each = torch::nn::AnyModule(std::make_shared<ReportingModule>(each));
    }
}

bool SequentialScopes::any() const { return !replaced_.empty(); }

SequentialScopes::~SequentialScopes() {
  for (Replaced& replaced : replaced_)
    std::move(replaced.modules.begin(), replaced.modules.end(), replaced.sequential->begin());
}

}  // namespace penstock::graph
