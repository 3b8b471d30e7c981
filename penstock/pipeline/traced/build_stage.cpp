// Stages of a traced pipeline: their tensors on their device, their modules, their examples.
#include <ATen/ATen.h>
#include <c10/core/TensorOptions.h>
#include <fmt/format.h>

#include <memory>
#include <set>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/pipeline/traced/module_tree.h"
#include "penstock/pipeline/traced/pipe_state.h"
#include "penstock/pipeline/traced/traced_stage.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/switch_data.h"
#include "penstock/trace_pipeline.h"

namespace penstock {
namespace {

struct BuiltStage {
  std::shared_ptr<TracedStage> traced;
  std::shared_ptr<torch::nn::Module> root;

  StageModule module() const {
    return StageModule(
        [traced = traced](const Tree& args, const Tree& kwargs) { return traced->forward(args, kwargs); },
        {root});
  }
};

// What a model computes may depend on the device it was traced on: LibTorch has operators for one kind of
// device.
void check_kernels(const PipeState& state, int stage, at::Device device) {
  if (device.type() == state.device.type() || device.is_meta()) return;
  const c10::DispatchKey key = c10::computeDispatchKey(at::kFloat, at::kStrided, device);
  const auto check = [&](const graph::Node& node, const std::string& line) {
    if (node.op.hasComputedKernelForDispatchKey(key)) return;
    throw ValueError(
        fmt::format("build_stage: stage {} on {}: {} has no kernel for {}: it was recorded on {}, where the "
                    "model may run "
                    "operators that {} does not have; trace it with its parameters and example on {}, or "
                    "with parameters on "
                    "the meta device and TraceOptions::device",
                    stage, device.str(), line, device.str(), state.device.str(), device.str(), device.str()));
  };
  for (const PipeVariant& variant : state.variants) {
    const graph::CutStage& cut = variant.cut.stages[static_cast<std::size_t>(stage)];
    for (std::size_t i = cut.first; i < cut.end; ++i)
      check(variant.trace.graph.nodes[i], "'" + variant.trace.line(i) + "'");
    for (const std::size_t index : cut.functions) {
      const graph::CustomFunction& function = variant.trace.functions[index];
      for (const graph::Node& node : function.backward)
        check(node, fmt::format("'{}' in the backward of {}", c10::toString(node.op.operator_name()),
                                function.name));
    }
  }
}

// Gives a tensor of the model memory on the device, in place.
void give_memory(const at::Tensor& tensor, const std::string& name, at::Device device,
                 const BuildStageOptions& options) {
  const at::NoGradGuard no_grad;
  const bool without_memory = tensor.is_meta() || is_fake(tensor);
  if (is_fake(tensor) && options.deferred) {
    options.deferred->materialize({tensor}, device);
    return;
  }
  if (!without_memory) {
    if (tensor.device() != device) tensor.set_data(tensor.to(device));
    return;
  }
  const at::Tensor memory =
      at::empty_strided(tensor.sizes(), tensor.strides(), at::device(device).dtype(tensor.scalar_type()));
  // LibTorch does not let a tensor on the meta device be replaced by one of another kind of device.
  if (tensor.is_meta() && !is_fake(tensor))
    switch_data(tensor, memory);
  else
    replace_data(tensor, memory);
  if (!options.initialize) return;
  at::Tensor filled = tensor;
  options.initialize(name, filled);
}

// The tensor of a stage that is not the first to use it, or of a second copy.
at::Tensor own_leaf(const at::Tensor& tensor, bool copy) {
  const at::NoGradGuard no_grad;
  at::Tensor own = tensor.detach();
  if (copy) own = own.clone();
  return own.set_requires_grad(tensor.requires_grad());
}

BuiltStage built(const Pipe& pipe, int index, at::Device device, const BuildStageOptions& options) {
  const PipeState& state = state_of(pipe);
  if (options.copies < 1 || options.copies > 2)
    throw ValueError(describe("build_stage: copies", std::to_string(options.copies),
                              "1, or 2 for a bidirectional "
                              "schedule"));
  const int stages = options.copies * state.stages();
  if (index < 0 || index >= stages)
    throw ValueError(describe("build_stage: index", std::to_string(index), fmt::format("0 to {}", stages - 1),
                              "number the stages as the pipe does; stages of a second copy follow "
                              "(BuildStageOptions::copies)"));
  if (options.group) pipe.check_equal(*options.group);
  const int stage = index % state.stages();
  check_kernels(state, stage, device);
  const bool is_copy = index >= state.stages();
  std::vector<at::Tensor> tensors(state.tensors.size());
  std::vector<StageTensor> named;
  for (const OwnedTensor& owned : state.state[static_cast<std::size_t>(stage)]) {
    const at::Tensor& original = state.tensors[owned.index];
    const bool shared = is_copy || state.first_user(owned.index) != stage;
    // The tensor is also that of the stage that uses it first, which may be on another device.
    const bool elsewhere = shared && !original.is_meta() && !is_fake(original) && original.device() != device;
    if (!elsewhere) give_memory(original, state.names[owned.index], device, options);
    if (elsewhere)
      tensors[owned.index] =
          own_leaf(original.detach().to(device).set_requires_grad(original.requires_grad()), false);
    else
      tensors[owned.index] = shared ? own_leaf(original, is_copy) : original;
    for (const std::string& name : owned.names)
      named.push_back({name, tensors[owned.index], state.is_parameter(owned.index)});
  }
  const graph::CutStage& cut = state.main().cut.stages[static_cast<std::size_t>(stage)];
  const auto begin = state.main().trace.module_of_node.begin();
  const std::set<std::string> computing(begin + static_cast<std::ptrdiff_t>(cut.first),
                                        begin + static_cast<std::ptrdiff_t>(cut.end));
  ModuleTree tree = make_module_tree(state.modules, computing, named);
  std::shared_ptr<torch::nn::Module> root = tree.root;
  return {std::make_shared<TracedStage>(pipe, stage, std::move(tree), std::move(tensors), device),
          std::move(root)};
}

}  // namespace

StageModule stage_module(const Pipe& pipe, int index, at::Device device, const BuildStageOptions& options) {
  return built(pipe, index, device, options).module();
}

PipelineStage build_stage(const Pipe& pipe, int index, at::Device device, const BuildStageOptions& options) {
  const BuiltStage stage = built(pipe, index, device, options);
  StageOptions stage_options = options.stage;
  if (!stage_options.input_args) stage_options.input_args = stage.traced->example_inputs();
  if (!stage_options.output_args) stage_options.output_args = stage.traced->example_outputs();
  return {stage.module(), index, options.copies * pipe.stages(), device, std::move(stage_options)};
}

}  // namespace penstock
