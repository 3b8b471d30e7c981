#include "penstock/graph/run/compiled_call.h"

#include <fmt/format.h>

#include <functional>
#include <iterator>
#include <mutex>
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

// Compiled when it runs for the first time, by whichever thread comes first.
class CompiledLater final : public CompiledGraph {
 public:
  using Compile = std::function<std::shared_ptr<const CompiledGraph>()>;
  explicit CompiledLater(Compile compile) : compile_(std::move(compile)) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    {
      const std::lock_guard lock(mutex_);
      if (compile_) {
        compiled_ = compile_();
        compile_ = nullptr;
      }
    }
    return compiled_->run(std::move(inputs), sizes);
  }

 private:
  mutable std::mutex mutex_;
  mutable Compile compile_;                                // until then
  mutable std::shared_ptr<const CompiledGraph> compiled_;  // never replaced
};

CompiledHalves compile_halves(const PartitionedCapture& capture, const CompilerChoice& compilers,
                              CompileBackward when, const GraphWrappers& wrappers) {
  const Partition& halves = capture.halves;
  if (capture.capture.joint.tangents.empty())
    return {compile_wrapped(halves.forward, forward_request(capture, GraphRole::Inference),
                            *compilers.inference, wrappers),
            nullptr, wrappers};
  auto forward = compile_wrapped(halves.forward, forward_request(capture, GraphRole::Forward),
                                 *compilers.forward, wrappers);
  const CompileRequest request = backward_request(capture);
  if (when == CompileBackward::AtOnce)
    return {std::move(forward), compile_wrapped(halves.backward, request, *compilers.backward, wrappers),
            wrappers};
  return {std::move(forward),
          std::make_shared<const CompiledLater>(
              [graph = halves.backward, request, compiler = compilers.backward, wrappers] {
                return compile_wrapped(graph, request, *compiler, wrappers);
              }),
          wrappers};
}

std::string line_of(std::string_view name, const std::string& decision) {
  return decision.empty() ? std::string(name) : fmt::format("{}: {}", name, decision);
}

}  // namespace

CompiledCall::CompiledCall(PartitionedCapture capture, const CompilerChoice& compilers,
                           CompiledCallOptions options)
    : partitioned_(std::move(capture)),
      wrappers_(partitioned_.capture.wrappers),
      graph_wrappers_(std::move(options.outside)) {
  const FunctionCapture& function = partitioned_.capture;
  wrappers_.push_back({std::make_shared<const Epilogue>(function), function.meta});
  if (function.joint.subclasses)
    graph_wrappers_.push_back(
        std::make_shared<const Subclasses>(function.joint, function.meta, function.convention));
  Call graphs =
      [call = c10::make_intrusive<GraphCall>(
           partitioned_, compile_halves(partitioned_, compilers, options.compile_backward, graph_wrappers_))](
          const Values& inputs, const CallSizes& sizes) {
        std::vector<at::Tensor> returned = call->run(tensors_among(inputs), sizes);
        return Values(std::make_move_iterator(returned.begin()), std::make_move_iterator(returned.end()));
      };
  call_ = wrap(std::move(graphs), wrappers_);
  if (!function.symbols.empty())
    dynamic_.emplace(function.symbols, function.joint.graph.table, options.trust_sizes);
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
