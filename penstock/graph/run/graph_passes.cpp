#include "penstock/graph/run/graph_passes.h"

#include <numeric>
#include <utility>

#include "penstock/graph/run/half_requests.h"

namespace penstock::graph {
namespace {

PassContext context_of(PassRole role, const CompileRequest& request) {
  PassContext context;
  context.role = role;
  context.static_inputs = request.static_inputs;
  context.donated_inputs = request.donated_inputs;
  return context;
}

}  // namespace

void run_passes_on_joint(FunctionCapture& capture, const PassList& passes, PassLog* log) {
  if (capture.joint.graph.table) return;
  PassContext context;
  context.role = capture.joint.tangents.empty() ? PassRole::Inference : PassRole::Joint;
  context.static_inputs.resize(static_primals(capture));
  std::iota(context.static_inputs.begin(), context.static_inputs.end(), std::size_t{0});
  capture.joint.graph = passes.run(std::move(capture.joint.graph), std::move(context), log);
}

void run_passes_on_halves(PartitionedCapture& split, const PassList& passes, PassLog* log) {
  if (passes.passes().empty()) return;
  const bool symbols = split.capture.joint.graph.table != nullptr;
  const bool inference = split.capture.joint.tangents.empty();
  // With fixed sizes they have run already.
  if (inference && !symbols) return;
  const GraphRole role = inference ? GraphRole::Inference : GraphRole::Forward;
  Graph& forward = split.halves.forward;
  forward = passes.run(
      std::move(forward),
      context_of(inference ? PassRole::Inference : PassRole::Forward, forward_request(split, role)), log,
      symbols);
  if (inference) return;
  Graph& backward = split.halves.backward;
  backward =
      passes.run(std::move(backward), context_of(PassRole::Backward, backward_request(split)), log, symbols);
}

}  // namespace penstock::graph
