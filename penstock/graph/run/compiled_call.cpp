#include "penstock/graph/run/compiled_call.h"

#include <iterator>
#include <mutex>
#include <utility>

#include "penstock/graph/run/epilogue.h"
#include "penstock/graph/run/graph_call.h"

namespace penstock::graph {
namespace {

// Compiled when it runs for the first time, by whichever thread comes first.
class CompiledLater final : public CompiledGraph {
 public:
  CompiledLater(Graph graph, std::shared_ptr<const GraphCompiler> compiler)
      : graph_(std::move(graph)), compiler_(std::move(compiler)) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    {
      const std::lock_guard lock(mutex_);
      if (!compiled_) compiled_ = compiler_->compile(graph_, GraphRole::Backward);
    }
    return compiled_->run(std::move(inputs), sizes);
  }

 private:
  const Graph graph_;
  const std::shared_ptr<const GraphCompiler> compiler_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const CompiledGraph> compiled_;  // never replaced
};

CompiledHalves compile_halves(const PartitionedCapture& capture,
                              const std::shared_ptr<const GraphCompiler>& compiler, CompileBackward when) {
  if (capture.capture.joint.tangents.empty())
    return {compiler->compile(capture.halves.forward, GraphRole::Inference), nullptr};
  auto forward = compiler->compile(capture.halves.forward, GraphRole::Forward);
  if (when == CompileBackward::FirstUse)
    return {std::move(forward), std::make_shared<const CompiledLater>(capture.halves.backward, compiler)};
  return {std::move(forward), compiler->compile(capture.halves.backward, GraphRole::Backward)};
}

}  // namespace

CompiledCall::CompiledCall(PartitionedCapture capture, std::shared_ptr<const GraphCompiler> compiler,
                           bool trust_sizes, CompileBackward when)
    : partitioned_(std::move(capture)), wrappers_(partitioned_.capture.wrappers) {
  const FunctionCapture& function = partitioned_.capture;
  wrappers_.push_back({std::make_shared<const Epilogue>(function), function.meta});
  Call graphs = [call = make_graph_call(partitioned_, compile_halves(partitioned_, compiler, when))](
                    const Values& inputs, const CallSizes& sizes) {
    std::vector<at::Tensor> returned = call->run(tensors_among(inputs), sizes);
    return Values(std::make_move_iterator(returned.begin()), std::make_move_iterator(returned.end()));
  };
  call_ = wrap(std::move(graphs), wrappers_);
  if (!function.symbols.empty()) dynamic_.emplace(function.symbols, function.joint.graph.table, trust_sizes);
}

std::vector<std::string> CompiledCall::wrappers() const {
  std::vector<std::string> names;
  for (const WrapperInUse& used : wrappers_) names.emplace_back(used.wrapper->name());
  return names;
}

}  // namespace penstock::graph
