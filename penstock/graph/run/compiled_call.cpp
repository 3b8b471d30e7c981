#include "penstock/graph/run/compiled_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <mutex>
#include <utility>

#include "penstock/graph/partition/backward_split.h"
#include "penstock/graph/run/epilogue.h"
#include "penstock/graph/run/graph_call.h"
#include "penstock/graph/run/half_requests.h"
#include "penstock/graph/run/separate_gradients.h"
#include "penstock/graph/wrap/effect_tokens.h"
#include "penstock/graph/wrap/random_numbers.h"
#include "penstock/graph/wrap/subclasses.h"

namespace penstock::graph {
namespace {

std::string line_of(std::string_view name, const std::string& decision) {
  return decision.empty() ? std::string(name) : fmt::format("{}: {}", name, decision);
}

}  // namespace

// A half of a call, with the wrappers of graphs around it. Compiled at once, or when it runs for the first
// time, by whichever thread comes first.
class CompiledHalf final : public CompiledGraph {
 public:
  CompiledHalf(const Graph& graph, CompileRequest request, std::shared_ptr<const GraphCompiler> compiler,
               GraphWrappers wrappers, std::optional<std::vector<std::uint8_t>> code, CompileBackward when)
      : compiler_(std::move(compiler)) {
    Compile compile = [this, request = std::move(request), wrappers = std::move(wrappers),
                       code = std::move(code)](const Graph& halve) {
      wrapped_ = compile_wrapped(halve, request, Loading(*this, code), wrappers);
    };
    if (when == CompileBackward::AtOnce) {
      compile(graph);
      is_compiled_ = true;
    } else {
      later_ = [graph, compile = std::move(compile)] { compile(graph); };
    }
  }

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    if (!is_compiled_.load(std::memory_order_acquire)) {
      const std::lock_guard lock(mutex_);
      if (later_) {
        later_();
        later_ = nullptr;
        is_compiled_.store(true, std::memory_order_release);
      }
    }
    return wrapped_->run(std::move(inputs), sizes);
  }

  // What to run: itself only as long as it has not been compiled.
  static std::shared_ptr<const CompiledGraph> runnable(const std::shared_ptr<const CompiledHalf>& half) {
    return half && half->wrapped_ ? half->wrapped_ : half;
  }

  std::optional<std::vector<std::uint8_t>> code() const {
    const std::lock_guard lock(mutex_);
    return later_ ? std::nullopt : compiler_->artifact(*inner_);
  }

 private:
  using Compile = std::function<void(const Graph&)>;

  // The compiler, which uses code of an earlier run. Notes what it returns, before that is wrapped.
  class Loading final : public GraphCompiler {
   public:
    Loading(const CompiledHalf& half, const std::optional<std::vector<std::uint8_t>>& code)
        : half_(half), code_(code) {}
    std::string_view name() const override { return half_.compiler_->name(); }
    std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                                 const CompileRequest& request) const override {
      std::shared_ptr<const CompiledGraph> loaded;
      if (code_) loaded = half_.compiler_->load(graph, request, *code_);
      half_.inner_ = loaded ? std::move(loaded) : half_.compiler_->compile(graph, request);
      return half_.inner_;
    }

   private:
    const CompiledHalf& half_;
    const std::optional<std::vector<std::uint8_t>>& code_;
  };

  std::shared_ptr<const GraphCompiler> compiler_;
  mutable std::mutex mutex_;
  mutable std::function<void()> later_;                           // until then
  mutable std::atomic<bool> is_compiled_{false};                  // then no run takes the lock
  mutable std::shared_ptr<const CompiledGraph> inner_, wrapped_;  // never replaced
};

CompiledCall::CompiledCall(PartitionedCapture capture, const CompilerChoice& compilers,
                           CompiledCallOptions options)
    : partitioned_(std::move(capture)),
      wrappers_(partitioned_.capture.wrappers),
      graph_wrappers_(std::move(options.outside)) {
  const FunctionCapture& function = partitioned_.capture;
  const bool inference = function.joint.tangents.empty();
  const Partition& split = partitioned_.halves;
  std::optional<BackwardParts> parts;
  std::vector<std::size_t> shared;
  if (!inference) {
    const BackwardRoles roles = backward_roles(function, split);
    shared = gradients_in_shared_memory(split.backward, roles, split.deferred);
    if (!split.deferred.empty()) parts = split_backward_graph(split.backward, roles, split.deferred);
  }
  wrappers_.push_back({std::make_shared<const Epilogue>(function), function.meta});
  if (function.joint.subclasses)
    graph_wrappers_.push_back(
        std::make_shared<const Subclasses>(function.joint, function.meta, function.convention));
  const GraphWrappers without_states = graph_wrappers_;
  const auto has_states = [&](StateKind kind) {
    return std::any_of(function.joint.states.begin(), function.joint.states.end(),
                       [&](const StateChain& state) { return state.kind == kind; });
  };
  if (has_states(StateKind::Token))
    graph_wrappers_.push_back(std::make_shared<const EffectTokens>(function.joint));
  if (has_states(StateKind::Generator))
    graph_wrappers_.push_back(std::make_shared<const RandomNumbers>(function.joint, parts ? parts->kept : 0));
  const auto with_options = [&](CompileRequest request) {
    request.exact = options.exact;
    request.check = options.check;
    return request;
  };
  forward_ = std::make_shared<const CompiledHalf>(
      split.forward,
      with_options(forward_request(partitioned_, inference ? GraphRole::Inference : GraphRole::Forward)),
      inference ? compilers.inference : compilers.forward, graph_wrappers_, std::move(options.code.forward),
      CompileBackward::AtOnce);
  if (!inference)
    backward_ = std::make_shared<const CompiledHalf>(
        parts ? parts->inputs.graph : split.backward,
        with_options(parts ? request_of(parts->inputs) : backward_request(partitioned_)), compilers.backward,
        with_separate_gradients(graph_wrappers_, shared), std::move(options.code.backward),
        options.compile_backward);
  CompiledHalves halves{.forward = CompiledHalf::runnable(forward_),
                        .backward = CompiledHalf::runnable(backward_),
                        .wrappers = graph_wrappers_};
  if (parts) {
    // Operators with states are in the first part.
    weights_ = std::make_shared<const CompiledHalf>(
        parts->weights.graph, with_options(request_of(parts->weights)), compilers.backward,
        with_separate_gradients(without_states, shared), std::move(options.code.weights),
        options.compile_backward);
    halves.weights = CompiledHalf::runnable(weights_);
    halves.saved_for_backward = std::move(parts->inputs.saved);
    halves.saved_for_weights = std::move(parts->weights.saved);
    halves.is_deferred = std::move(parts->is_deferred);
    halves.kept = parts->kept;
  }
  Call graphs = [call = c10::make_intrusive<GraphCall>(partitioned_, std::move(halves))](
                    const Values& inputs, const CallSizes& sizes) {
    std::vector<at::Tensor> returned = call->run(tensors_among(inputs), sizes);
    return Values(std::make_move_iterator(returned.begin()), std::make_move_iterator(returned.end()));
  };
  call_ = wrap(std::move(graphs), wrappers_);
  if (!function.symbols.empty())
    dynamic_.emplace(function.symbols, function.joint.graph.table, options.trust_sizes);
}

CompiledCode CompiledCall::code() const {
  return {forward_->code(), backward_ ? backward_->code() : std::nullopt,
          weights_ ? weights_->code() : std::nullopt};
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
