#include "penstock/graph/run/compiled_call.h"

#include <iterator>
#include <numeric>
#include <utility>

#include "penstock/graph/run/epilogue.h"
#include "penstock/graph/run/graph_call.h"

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

CompiledHalves compile_halves(const PartitionedCapture& capture, const CompilerChoice& compilers) {
  const Partition& halves = capture.halves;
  if (capture.capture.joint.tangents.empty())
    return {compilers.inference.compile(halves.forward, forward_request(capture, GraphRole::Inference)),
            nullptr};
  return {compilers.forward.compile(halves.forward, forward_request(capture, GraphRole::Forward)),
          compilers.backward.compile(halves.backward, backward_request(capture))};
}

}  // namespace

CompiledCall::CompiledCall(PartitionedCapture capture, const CompilerChoice& compilers, bool trust_sizes)
    : partitioned_(std::move(capture)), wrappers_(partitioned_.capture.wrappers) {
  const FunctionCapture& function = partitioned_.capture;
  wrappers_.push_back({std::make_shared<const Epilogue>(function), function.meta});
  Call graphs = [call = make_graph_call(partitioned_, compile_halves(partitioned_, compilers))](
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
