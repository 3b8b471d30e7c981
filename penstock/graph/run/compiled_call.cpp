#include "penstock/graph/run/compiled_call.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>

#include "penstock/graph/run/epilogue.h"
#include "penstock/graph/run/graph_call.h"
#include "penstock/graph/wrap/subclasses.h"

namespace penstock::graph {
namespace {

CompiledHalves compile_halves(const PartitionedCapture& capture, const GraphCompiler& compiler,
                              const GraphWrappers& wrappers) {
  const auto compile = [&](const Graph& graph, GraphRole role) {
    return compile_wrapped(graph, role, compiler, wrappers);
  };
  if (capture.capture.joint.tangents.empty())
    return {compile(capture.halves.forward, GraphRole::Inference), nullptr, wrappers};
  return {compile(capture.halves.forward, GraphRole::Forward),
          compile(capture.halves.backward, GraphRole::Backward), wrappers};
}

std::string line_of(std::string_view name, const std::string& decision) {
  return decision.empty() ? std::string(name) : fmt::format("{}: {}", name, decision);
}

}  // namespace

CompiledCall::CompiledCall(PartitionedCapture capture, const GraphCompiler& compiler, bool trust_sizes,
                           GraphWrappers outside)
    : partitioned_(std::move(capture)),
      wrappers_(partitioned_.capture.wrappers),
      graph_wrappers_(std::move(outside)) {
  const FunctionCapture& function = partitioned_.capture;
  wrappers_.push_back({std::make_shared<const Epilogue>(function), function.meta});
  if (function.joint.subclasses)
    graph_wrappers_.push_back(
        std::make_shared<const Subclasses>(function.joint, function.meta, function.convention));
  Call graphs = [call = c10::make_intrusive<GraphCall>(
                     partitioned_, compile_halves(partitioned_, compiler, graph_wrappers_))](
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
  for (const auto& wrapper : graph_wrappers_) names.emplace_back(wrapper->name());
  return names;
}

std::vector<std::string> CompiledCall::wrapper_decisions() const {
  std::vector<std::string> lines;
  for (const WrapperInUse& used : wrappers_)
    lines.push_back(line_of(used.wrapper->name(), used.wrapper->decision()));
  for (const auto& wrapper : graph_wrappers_) lines.push_back(line_of(wrapper->name(), wrapper->decision()));
  return lines;
}

}  // namespace penstock::graph
