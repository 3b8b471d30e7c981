#include "penstock/graph/stages/forward_trace.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <optional>
#include <string_view>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/ir/subclass_record.h"
#include "penstock/graph/stages/custom_functions.h"
#include "penstock/graph/stages/history_of_values.h"
#include "penstock/graph/stages/module_recorder.h"
#include "penstock/graph/trace/fake_in_place.h"
#include "penstock/graph/trace/tracer.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock::graph {
namespace {

std::vector<at::Tensor> real_among_found(const Values& inputs, std::size_t found) {
  std::vector<at::Tensor> real;
  for (std::size_t i = 0; i < found; ++i)
    if (const at::Tensor& tensor = inputs.at(i).toTensor(); !is_fake(tensor)) real.push_back(tensor);
  return real;
}

class TraceRun {
 public:
  TraceRun(const Values& inputs, const TraceSettings& settings)
      : settings_(settings),
        found_(real_among_found(inputs, settings.found), settings.device),
        modules_(settings.roots, tracer_.graph),
        history_(tracer_.graph, modules_) {
    tracer_.found = settings.found;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!is_defined_tensor(inputs[i])) {
        inputs_.push_back(inputs[i]);
        continue;
      }
      const at::Tensor fake = fake_input(inputs[i].toTensor(), i);
      tracer_.add_input(fake, name_of(i));
      history_.note(fake, tracer_.graph.inputs.back().value);
      input_of_graph_.push_back(i);
      inputs_.emplace_back(fake);
    }
    history_.note_hooks();
  }

  ForwardTrace run(const Function& function) {
    tracer_.seen = [this](const at::Tensor& tensor, ValueId value) { return history_.note(tensor, value); };
    const c10::AutoGradMode gradients(true);
    const OwnAutocastCache cast_weights;
    const ModeGuard below(fake_mode_);
    const ModeGuard on(tracer_);
    Values outputs;
    {
      const ScopeListenerGuard listening(modules_);
      try {
        outputs = function(inputs_);
      } catch (const DataDependentError& error) {
        throw DataDependentError(fmt::format("{} ({}{}); a traced forward must do the same for all values",
                                             error.what(), in_module(modules_.current()), last_line()));
      }
    }
    for (const c10::IValue& output : outputs) {
      if (is_defined_tensor(output) && is_subclass(output.toTensor())) refuse_subclass("result", output);
      tracer_.graph.outputs.push_back(tracer_.operand_of(output));
    }
    history_.finish();
    tracer_.seen = nullptr;
    ForwardTrace trace;
    trace.module_of_node = modules_.paths(settings_.found, settings_.aliases);
    refuse_hooks(trace.module_of_node);
    trace.marks = modules_.marks;
    trace.functions = record_custom_functions(tracer_, history_);
    verify(tracer_.graph);
    trace.graph = std::move(tracer_.graph);
    trace.input_of_graph = std::move(input_of_graph_);
    trace.found = settings_.found;
    for (std::size_t i = 0; i < trace.graph.values.size(); ++i)
      trace.requires_grad.push_back(history_.requires_grad(ValueId{static_cast<std::int32_t>(i)}) ? 1 : 0);
    return trace;
  }

 private:
  std::string name_of(std::size_t input) const {
    return input < settings_.names.size() ? settings_.names[input] : fmt::format("input {}", input);
  }

  [[noreturn]] void refuse_subclass(const std::string& what, const c10::IValue& value) const {
    throw TypeError(describe(fmt::format("graph: {} of a traced forward", what), type_text(value.toTensor()),
                             "a plain tensor",
                             "trace the model with plain tensors; stages with distributed ones are made of "
                             "modules (StageModule)"));
  }

  // A replay makes nodes of its own, which do not have them.
  void refuse_hooks(const std::vector<std::string>& module_of_node) const {
    const std::optional<ValueId> value = history_.hooked();
    if (!value) return;
    throw NotImplemented(fmt::format(
        "graph: the forward sets a gradient hook (register_hook, retain_grad) on {}, which a replay would "
        "not "
        "call; change the gradient in the backward of a torch::autograd::Function, or set the hook of a "
        "parameter outside of the forward",
        origin_of(*value, module_of_node)));
  }

  std::string origin_of(ValueId value, const std::vector<std::string>& module_of_node) const {
    const Graph& graph = tracer_.graph;
    for (const Placeholder& input : graph.inputs)
      if (input.value == value) return fmt::format("'{}'", input.name);
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
      bool makes = false;
      for_each_value(graph.nodes[i].results, [&](ValueId result) { makes |= result == value; });
      if (makes)
        return fmt::format("the result of '{} {}'", to_text(graph, graph.nodes[i]),
                           in_module(module_of_node[i]));
    }
    return "a tensor";
  }

  at::Tensor fake_input(const at::Tensor& tensor, std::size_t input) const {
    if (!is_fake(tensor) && is_subclass(tensor)) refuse_subclass("input " + name_of(input), tensor);
    if (input < settings_.found || is_fake(tensor)) return tensor;
    return tensor.is_meta() ? to_fake(tensor, settings_.device) : to_fake(tensor);
  }

  std::string last_line() const {
    const Graph& graph = tracer_.graph;
    return graph.nodes.empty() ? std::string()
                               : fmt::format(", after {}", to_text(graph, graph.nodes.back()));
  }

  const TraceSettings& settings_;
  const FakeInPlace found_;  // destroyed after everything below
  FakeMode fake_mode_;
  Tracer tracer_;
  ModuleRecorder modules_;
  HistoryOfValues history_;
  Values inputs_;
  std::vector<std::size_t> input_of_graph_;
};

// What LibTorch says if a forward takes a module out of a Sequential by its type.
bool is_about_any_module(const std::string& text) {
  return text.find("Attempted to cast module") != std::string::npos;
}

}  // namespace

std::string ForwardTrace::line(std::size_t node) const {
  return fmt::format("{} {}", to_text(graph, graph.nodes.at(node)), in_module(module_of_node.at(node)));
}

ForwardTrace trace_forward(const Function& function, const Values& inputs, const TraceSettings& settings) {
  {
    std::optional<SequentialScopes> scopes(std::in_place, settings.roots);
    if (scopes->any()) {
      try {
        return TraceRun(inputs, settings).run(function);
      } catch (const c10::Error& error) {
        if (!is_about_any_module(error.what())) throw;
      }
    }
  }
  return TraceRun(inputs, settings).run(function);
}

}  // namespace penstock::graph
