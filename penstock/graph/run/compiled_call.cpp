#include "penstock/graph/run/compiled_call.h"

#include <fmt/format.h>

#include <iterator>
#include <numeric>
#include <utility>

#include "penstock/graph/run/epilogue.h"
#include "penstock/graph/run/graph_call.h"
#include "penstock/graph/wrap/subclasses.h"

namespace penstock::graph {
namespace {

// The number of inputs of the joint graph that are parameters and buffers.
std::size_t static_primals(const FunctionCapture& capture) {
  const std::size_t found = capture.convention.found;
  if (found == 0 || !capture.joint.subclasses) return found;
  const FlattenRecord& last = capture.joint.subclasses->inputs[found - 1];
  return last.first_flat() + last.count();
}

CompileRequest forward_request(const PartitionedCapture& capture, GraphRole role) {
  CompileRequest request{.role = role};
  request.static_inputs.resize(static_primals(capture.capture));
  std::iota(request.static_inputs.begin(), request.static_inputs.end(), std::size_t{0});
  return request;
}

CompileRequest backward_request(const PartitionedCapture& capture) {
  const JointGraph& joint = capture.capture.joint;
  CompileRequest request{.role = GraphRole::Backward, .donated_inputs = capture.halves.donated(joint)};
  // Backward takes the saved tensors first. A parameter that forward writes is saved as a copy.
  const std::size_t found = static_primals(capture.capture);
  for (std::size_t i = 0; i < capture.halves.saved.size(); ++i)
    for (std::size_t primal = 0; primal < found; ++primal)
      if (joint.graph.inputs[primal].value == capture.halves.saved[i] &&
          !capture.capture.primal_written[primal])
        request.static_inputs.push_back(i);
  return request;
}

CompiledHalves compile_halves(const PartitionedCapture& capture, const CompilerChoice& compilers,
                              const GraphWrappers& wrappers) {
  const Partition& halves = capture.halves;
  if (capture.capture.joint.tangents.empty())
    return {compile_wrapped(halves.forward, forward_request(capture, GraphRole::Inference),
                            compilers.inference, wrappers),
            nullptr, wrappers};
  return {compile_wrapped(halves.forward, forward_request(capture, GraphRole::Forward), compilers.forward,
                          wrappers),
          compile_wrapped(halves.backward, backward_request(capture), compilers.backward, wrappers),
          wrappers};
}

std::string line_of(std::string_view name, const std::string& decision) {
  return decision.empty() ? std::string(name) : fmt::format("{}: {}", name, decision);
}

}  // namespace

CompiledCall::CompiledCall(PartitionedCapture capture, const CompilerChoice& compilers, bool trust_sizes,
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
                     partitioned_, compile_halves(partitioned_, compilers, graph_wrappers_))](
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
