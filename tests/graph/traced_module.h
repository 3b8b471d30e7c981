// Traces a module of one root with positional tensor arguments, for tests of cutting.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/run/module_state.h"
#include "penstock/graph/stages/cut_places.h"
#include "penstock/graph/stages/forward_trace.h"

namespace penstock::graph::traced_module {

struct TracedForTest {
  ModuleState state;
  ForwardTrace trace;
  std::vector<InputKind> kinds;
  std::vector<std::string> modules;

  CutPlaces places() const { return {trace, kinds}; }
};

template <class Module>
TracedForTest traced(const std::shared_ptr<Module>& module, const std::vector<at::Tensor>& args,
                     const std::function<at::Tensor(Module&, const std::vector<at::Tensor>&)>& call) {
  TracedForTest result;
  result.state = ModuleState(*module);
  Values inputs(result.state.tensors.begin(), result.state.tensors.end());
  TraceSettings settings;
  settings.roots = {module};
  settings.names = result.state.names;
  settings.found = inputs.size();
  for (std::size_t i = 0; i < args.size(); ++i) {
    inputs.emplace_back(args[i]);
    settings.names.push_back("args[" + std::to_string(i) + "]");
  }
  const std::size_t found = settings.found;
  result.trace = trace_forward(
      [&](const Values& given) -> Values {
        std::vector<at::Tensor> tensors;
        for (std::size_t i = found; i < given.size(); ++i) tensors.push_back(given[i].toTensor());
        return {call(*module, tensors)};
      },
      inputs, settings);
  for (std::size_t i = 0; i < result.trace.graph.inputs.size(); ++i)
    result.kinds.push_back(i < found ? InputKind::State : InputKind::Positional);
  for (const auto& item : module->named_modules()) result.modules.push_back(item.key());
  return result;
}

template <class Module>
TracedForTest traced(const std::shared_ptr<Module>& module, const at::Tensor& x) {
  return traced<Module>(module, {x}, [](Module& m, const std::vector<at::Tensor>& in) -> at::Tensor {
    return m.forward(in[0]);
  });
}

}  // namespace penstock::graph::traced_module
