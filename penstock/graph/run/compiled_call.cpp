#include "penstock/graph/run/compiled_call.h"

#include <iterator>
#include <utility>

#include "penstock/graph/run/epilogue.h"
#include "penstock/graph/run/graph_call.h"

namespace penstock::graph {
namespace {

CompiledHalves compile_halves(const PartitionedCapture& capture, const GraphCompiler& compiler,
                              const CompiledCode& code) {
  const auto half = [&](const Graph& graph, GraphRole role, const auto& kept) {
    if (kept)
      if (auto loaded = compiler.load(graph, role, *kept)) return loaded;
    return compiler.compile(graph, role);
  };
  if (capture.capture.joint.tangents.empty())
    return {half(capture.halves.forward, GraphRole::Inference, code.forward), nullptr};
  return {half(capture.halves.forward, GraphRole::Forward, code.forward),
          half(capture.halves.backward, GraphRole::Backward, code.backward)};
}

}  // namespace

CompiledCall::CompiledCall(PartitionedCapture capture, const GraphCompiler& compiler, bool trust_sizes,
                           const CompiledCode& code)
    : partitioned_(std::move(capture)),
      compiled_(compile_halves(partitioned_, compiler, code)),
      wrappers_(partitioned_.capture.wrappers) {
  const FunctionCapture& function = partitioned_.capture;
  wrappers_.push_back({std::make_shared<const Epilogue>(function), function.meta});
  Call graphs = [call = make_graph_call(partitioned_, compiled_)](const Values& inputs,
                                                                  const CallSizes& sizes) {
    std::vector<at::Tensor> returned = call->run(tensors_among(inputs), sizes);
    return Values(std::make_move_iterator(returned.begin()), std::make_move_iterator(returned.end()));
  };
  call_ = wrap(std::move(graphs), wrappers_);
  if (!function.symbols.empty()) dynamic_.emplace(function.symbols, function.joint.graph.table, trust_sizes);
}

CompiledCode CompiledCall::code(const GraphCompiler& compiler) const {
  return {compiler.artifact(*compiled_.forward),
          compiled_.backward ? compiler.artifact(*compiled_.backward) : std::nullopt};
}

std::vector<std::string> CompiledCall::wrappers() const {
  std::vector<std::string> names;
  for (const WrapperInUse& used : wrappers_) names.emplace_back(used.wrapper->name());
  return names;
}

}  // namespace penstock::graph
