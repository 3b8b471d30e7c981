// Notes which module each node of a trace belongs to.
//
//   ModuleRecorder recorder(roots, tracer.graph);
//   {
//     const ScopeListenerGuard listening(recorder);
//     ...                                              // run forward under the tracer
//   }
//   recorder.paths(found);                             // one for each node
//
// Private to this folder. Thread safety: one thread.
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/torch/dispatch/scope_listener.h"

namespace penstock::graph {

class ModuleRecorder final : public ScopeListener {
 public:
  ModuleRecorder(const std::vector<std::shared_ptr<torch::nn::Module>>& roots, const Graph& graph);

  void enter(const torch::nn::Module& module) override;
  void leave() noexcept override;
  void mark() override { marks.push_back(graph_.nodes.size()); }

  // The innermost module of each node: the one that reported itself, or inside of it the owner of a parameter
  // or buffer that the node takes. The first `found` inputs of the graph are parameters and buffers;
  // `aliases` as in TraceSettings.
  std::vector<std::string> paths(std::size_t found,
                                 const std::map<std::size_t, std::vector<std::string>>& aliases) const;
  // The module that is running, or that was running when an exception began to leave it; "" for the root.
  const std::string& current() const {
    return thrown_in_ ? *thrown_in_ : open_.empty() ? root_ : *open_.back();
  }

  std::vector<std::size_t> marks;

 private:
  struct Event {
    std::size_t node;  // the number of nodes before it
    const std::string* module;
  };
  const Graph& graph_;
  const std::string root_;
  std::unordered_map<const torch::nn::Module*, std::string> path_of_;
  std::vector<const std::string*> open_;
  const std::string* thrown_in_ = nullptr;
  int exceptions_before_ = std::uncaught_exceptions();
  std::vector<Event> events_;  // the module is the current one from this node on
};

// "in module 'encoder.0'", "of the root module", for messages.
std::string in_module(const std::string& path);

// Reports the modules of every torch::nn::Sequential below some roots, for a scope. Their AnyModules call
// them as before, and ptr() returns them; only AnyModule::get, with Sequential::at and ptr of a type, throws
// a c10::Error ("Attempted to cast module"), and the forward must then run without this.
class SequentialScopes {
 public:
  explicit SequentialScopes(const std::vector<std::shared_ptr<torch::nn::Module>>& roots);
  ~SequentialScopes();
  SequentialScopes(const SequentialScopes&) = delete;
  SequentialScopes& operator=(const SequentialScopes&) = delete;
  bool any() const;

 private:
  std::vector<std::shared_ptr<torch::nn::SequentialImpl>> sequentials_;
};

}  // namespace penstock::graph
