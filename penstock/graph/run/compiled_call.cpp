#include "penstock/graph/run/compiled_call.h"

#include <iterator>
#include <utility>

#include "penstock/graph/run/epilogue.h"
#include "penstock/graph/run/graph_call.h"

namespace penstock::graph {
namespace {

CompiledHalves compile_halves(const PartitionedCapture& capture, const GraphCompiler& compiler) {
  if (capture.capture.joint.tangents.empty())
    return {compiler.compile(capture.halves.forward, GraphRole::Inference), nullptr};
  return {compiler.compile(capture.halves.forward, GraphRole::Forward),
          compiler.compile(capture.halves.backward, GraphRole::Backward)};
}

}  // namespace

CompiledCall::CompiledCall(PartitionedCapture capture, const GraphCompiler& compiler, bool trust_sizes)
    : partitioned_(std::move(capture)), wrappers_(partitioned_.capture.wrappers) {
  const FunctionCapture& function = partitioned_.capture;
  wrappers_.push_back({std::make_shared<const Epilogue>(function), function.meta});
  Call graphs = [call = make_graph_call(partitioned_, compile_halves(partitioned_, compiler))](
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
