#include "penstock/graph/compiler/compile_later.h"

#include <mutex>
#include <utility>

namespace penstock::graph {
namespace {

class CompiledLater final : public CompiledGraph {
 public:
  CompiledLater(Graph graph, GraphRole role, std::shared_ptr<const GraphCompiler> compiler)
      : graph_(std::move(graph)), role_(role), compiler_(std::move(compiler)) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    std::shared_ptr<const CompiledGraph> compiled;
    {
      const std::lock_guard lock(mutex_);
      if (!compiled_) compiled_ = compiler_->compile(graph_, role_);
      compiled = compiled_;
    }
    return compiled->run(std::move(inputs), sizes);
  }

 private:
  const Graph graph_;
  const GraphRole role_;
  const std::shared_ptr<const GraphCompiler> compiler_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const CompiledGraph> compiled_;
};

}  // namespace

std::shared_ptr<const CompiledGraph> CompileLater::compile(const Graph& graph, GraphRole role) const {
  if (role != GraphRole::Backward) return compiler_->compile(graph, role);
  return std::make_shared<const CompiledLater>(graph, role, compiler_);
}

}  // namespace penstock::graph
