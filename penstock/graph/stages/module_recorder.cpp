#include "penstock/graph/stages/module_recorder.h"

#include <fmt/format.h>
#include <torch/nn/modules/container/any.h>

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

std::string in_module(const std::string& path) {
  return path.empty() ? std::string("of the root module") : fmt::format("in module '{}'", path);
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

using torch::nn::AnyModulePlaceholder;

// What an AnyModule contains is private. Explicit instantiation may name private members.
template <class Tag, typename Tag::Type member>
struct PrivateMemberOfAnyModule {
  friend typename Tag::Type reveal(Tag) { return member; }
};
struct ContentOfAnyModule {
  using Type = std::unique_ptr<AnyModulePlaceholder> torch::nn::AnyModule::*;
  friend Type reveal(ContentOfAnyModule);
};
template struct PrivateMemberOfAnyModule<ContentOfAnyModule, &torch::nn::AnyModule::content_>;

// Reports a module and calls it, whatever it takes and returns. To everyone who looks, it is the module
// itself, except that LibTorch refuses to return it by its type (AnyModule::get), since this is not the
// object it expects then.
struct ReportingContent final : AnyModulePlaceholder {
  explicit ReportingContent(std::unique_ptr<AnyModulePlaceholder> reported)
      : AnyModulePlaceholder(typeid(ReportingContent)), original(std::move(reported)) {}

  torch::nn::AnyValue forward(std::vector<torch::nn::AnyValue>&& arguments) override {
    const ModuleScope scope(*original->ptr());
    return original->forward(std::move(arguments));
  }
  std::shared_ptr<torch::nn::Module> ptr() override { return original->ptr(); }
  std::unique_ptr<AnyModulePlaceholder> copy() const override {
    return std::make_unique<ReportingContent>(original->copy());
  }
  // A clone reports nothing: the model has not registered it.
  std::unique_ptr<AnyModulePlaceholder> clone_module(c10::optional<at::Device> device) const override {
    return original->clone_module(device);
  }

  std::unique_ptr<AnyModulePlaceholder> original;
};

std::unique_ptr<AnyModulePlaceholder>& content_of(torch::nn::AnyModule& module) {
  return module.*reveal(ContentOfAnyModule{});
}

}  // namespace

SequentialScopes::SequentialScopes(const std::vector<std::shared_ptr<torch::nn::Module>>& roots) {
  for (const auto& root : roots)
    for (const auto& module : root->modules(true)) {
      auto sequential = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(module);
      if (!sequential ||
          std::find(sequentials_.begin(), sequentials_.end(), sequential) != sequentials_.end())
        continue;
      for (torch::nn::AnyModule& each : *sequential)
        if (std::unique_ptr<AnyModulePlaceholder>& content = content_of(each))
          content = std::make_unique<ReportingContent>(std::move(content));
      sequentials_.push_back(std::move(sequential));
    }
}

bool SequentialScopes::any() const { return !sequentials_.empty(); }

SequentialScopes::~SequentialScopes() {
  for (const auto& sequential : sequentials_)
    for (torch::nn::AnyModule& each : *sequential) {
      std::unique_ptr<AnyModulePlaceholder>& content = content_of(each);
      // The forward may have added modules.
      if (auto* reporting = dynamic_cast<ReportingContent*>(content.get()))
        content = std::unique_ptr<AnyModulePlaceholder>(std::move(reporting->original));
    }
}

}  // namespace penstock::graph
