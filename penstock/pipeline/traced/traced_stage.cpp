#include "penstock/pipeline/traced/traced_stage.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/run/leaf_values.h"
#include "penstock/torch/tree/dense_layout.h"
#include "penstock/torch/tree/same_leaf.h"

namespace penstock {

using graph::ValueId;

namespace {

// What a stage sends that has nothing for the next one. Integers have no gradient.
at::Tensor nothing_to_send(at::Device device) { return at::empty({0}, at::device(device).dtype(at::kByte)); }

// "" if the tensor can be in the place of the traced one.
std::string misfit(const at::Tensor& tensor, const graph::Geometry& geometry) {
  if (tensor.sizes() != at::IntArrayRef(geometry.sizes))
    return fmt::format("sizes [{}], in the example [{}]", fmt::join(tensor.sizes(), ", "),
                       fmt::join(geometry.sizes, ", "));
  if (tensor.scalar_type() != geometry.dtype)
    return fmt::format("dtype {}, in the example {}", c10::toString(tensor.scalar_type()),
                       c10::toString(geometry.dtype));
  return {};
}

// In the layout of the example, which operators that were recorded may rely on. A copy only of a tensor in
// another dense layout: what was not dense when it was recorded arrives dense.
at::Tensor in_example_layout(const at::Tensor& tensor, const graph::Geometry& geometry) {
  const at::IntArrayRef sizes(geometry.sizes), strides(geometry.strides);
  if (!is_dense(sizes, strides) || same_layout(sizes, tensor.strides(), strides)) return tensor;
  return at::empty_strided(sizes, strides, tensor.options()).copy_(tensor);
}

}  // namespace

TracedStage::TracedStage(Pipe pipe, int stage, ModuleTree tree, std::vector<at::Tensor> tensors,
                         at::Device device)
    : pipe_(std::move(pipe)),
      stage_(stage),
      tree_(std::move(tree)),
      tensors_(std::move(tensors)),
      device_(device) {
  for (const PipeVariant& traced : state_of(pipe_).variants)
    variants_.push_back(make_variant(traced, device));
}

TracedStage::Variant TracedStage::make_variant(const PipeVariant& traced, at::Device device) const {
  const graph::CutStage& cut = traced.cut.stages[static_cast<std::size_t>(stage_)];
  const graph::Graph& graph = traced.trace.graph;
  graph::ReplayPart part{.first = cut.first,
                         .end = cut.end,
                         .functions = cut.functions,
                         .inputs = {},
                         .outputs = {},
                         .recorded_on = state_of(pipe_).device,
                         .device = device};
  std::vector<ValueId> received;
  if (is_first())
    for (const std::size_t input : traced.cut.positional) received.push_back(graph.inputs[input].value);
  for (const auto* values : {&cut.main_inputs, &cut.skip_inputs})
    received.insert(received.end(), values->begin(), values->end());
  for (const auto* inputs : {&cut.state, &cut.keywords})
    for (const std::size_t input : *inputs) part.inputs.push_back(graph.inputs[input].value);
  part.inputs.insert(part.inputs.end(), received.begin(), received.end());
  if (is_last()) {
    part.outputs = graph.outputs;
  } else {
    for (const auto* values : {&cut.main_outputs, &cut.skip_outputs})
      for (const ValueId value : *values) part.outputs.push_back(graph::Operand::of(value));
  }
  return {&traced, &cut, cut.state, std::move(received), graph::NodeReplay(traced.trace, part)};
}

bool TracedStage::in_mode_of(const PipeVariant& traced) const {
  if (traced.any_mode) return true;
  for (std::size_t i = 0; i < tree_.modules.size(); ++i)
    if (tree_.modules[i] && tree_.modules[i]->is_training() != traced.training[i]) return false;
  return true;
}

std::string TracedStage::name_of(const Variant& variant, std::size_t received) const {
  const ValueId value = variant.received[received];
  const graph::Graph& graph = variant.traced->trace.graph;
  for (std::size_t i = variant.traced->trace.found; i < graph.inputs.size(); ++i)
    if (graph.inputs[i].value == value) return graph.inputs[i].name;
  return fmt::format("input {}", received);
}

void TracedStage::take_arguments(const Variant& variant, const Tree& args, Given& given) const {
  const PipeVariant& traced = *variant.traced;
  const FlatTree flat = flatten_tree(args);
  if (!(flat.spec == traced.args)) {
    const auto found = first_difference(traced.args, flat.spec);
    given.why_not = found.value_or("arguments of another structure");
    return;
  }
  std::vector<at::Tensor> by_leaf(flat.leaves.size());
  const std::vector<std::string> paths = flat.spec.leaf_paths("args");
  std::vector<char> traced_tensor(flat.leaves.size(), 0);
  for (const std::size_t input : traced.cut.positional) traced_tensor[traced.leaf_of(input)] = 1;
  for (std::size_t i = 0; i < flat.leaves.size() && given.why_not.empty(); ++i) {
    if (traced_tensor[i] != 0 && flat.leaves[i].is_tensor())
      by_leaf[i] = flat.leaves[i].tensor();
    else if (traced_tensor[i] != 0 || !same_leaf(flat.leaves[i], traced.leaves[i]))
      given.why_not =
          fmt::format("{} is {}, in the example {}", paths[i], flat.leaves[i].to_string(),
                      traced_tensor[i] != 0 ? std::string("a tensor") : traced.leaves[i].to_string());
  }
  for (const std::size_t input : traced.cut.positional)
    given.tensors.push_back(by_leaf[traced.leaf_of(input)]);
}

void TracedStage::take_received(const Variant& variant, const Tree& args, Given& given) const {
  const std::size_t nothing = variant.cut->main_inputs.empty() ? 1 : 0;
  const std::size_t expected = variant.received.size() + nothing;
  if (args.size() != expected) {
    given.why_not = fmt::format("{} tensors from other stages, in the example {}", args.size(), expected);
    return;
  }
  for (std::size_t i = nothing; i < args.size(); ++i) given.tensors.push_back(args[i].tensor());
}

void TracedStage::take_keywords(const Variant& variant, const Tree& kwargs, Given& given) const {
  const PipeVariant& traced = *variant.traced;
  const graph::Graph& graph = traced.trace.graph;
  const std::size_t first_leaf = traced.args.leaf_count();
  const std::vector<std::string> paths = traced.kwargs.leaf_paths("kwargs");
  std::map<std::string, Tree> by_path;
  for (std::size_t i = 0; i < kwargs.size(); ++i) {
    const FlatTree flat = flatten_tree(kwargs.entries()[i]);
    std::vector<std::string> own = flat.spec.leaf_paths(fmt::format("kwargs['{}']", kwargs.keys()[i]));
    for (std::size_t j = 0; j < own.size(); ++j) by_path.emplace(std::move(own[j]), flat.leaves[j]);
  }
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const auto found = by_path.find(paths[i]);
    if (found == by_path.end()) continue;
    const bool was_tensor = std::any_of(
        graph.inputs.begin() + static_cast<std::ptrdiff_t>(traced.trace.found), graph.inputs.end(),
        [&](const graph::Placeholder& input) { return input.name == paths[i]; });
    if (was_tensor ? !found->second.is_tensor() : !same_leaf(found->second, traced.leaves[first_leaf + i]))
      given.why_not =
          fmt::format("{} is {}, in the example {}", paths[i], found->second.to_string(),
                      was_tensor ? std::string("a tensor") : traced.leaves[first_leaf + i].to_string());
  }
  for (const auto& [path, leaf] : by_path)
    if (std::find(paths.begin(), paths.end(), path) == paths.end())
      given.why_not = fmt::format("{} is not in the example", path);
  for (const std::size_t input : variant.cut->keywords) {
    const auto found = by_path.find(graph.inputs[input].name);
    if (found == by_path.end())
      throw ValueError(describe(fmt::format("stage {}: {}", stage_, graph.inputs[input].name), "nothing",
                                "a tensor, which this stage uses",
                                "pass keyword arguments to `step` on every rank whose stages use them "
                                "(Pipe::keywords)"));
    given.tensors.push_back(found->second.is_tensor() ? found->second.tensor() : at::Tensor());
  }
}

TracedStage::Given TracedStage::given_to(const Variant& variant, const Tree& args, const Tree& kwargs) const {
  Given given;
  take_keywords(variant, kwargs, given);
  if (given.why_not.empty())
    is_first() ? take_arguments(variant, args, given) : take_received(variant, args, given);
  if (!given.why_not.empty()) return given;
  const PipeVariant& traced = *variant.traced;
  const std::size_t keywords = variant.cut->keywords.size();
  for (std::size_t i = 0; i < given.tensors.size() && given.why_not.empty(); ++i) {
    const bool is_keyword = i < keywords;
    const graph::Placeholder* argument =
        is_keyword ? &traced.trace.graph.inputs[variant.cut->keywords[i]] : nullptr;
    const ValueId value = is_keyword ? argument->value : variant.received[i - keywords];
    const std::string why = misfit(given.tensors[i], traced.geometry(value));
    if (!why.empty())
      given.why_not =
          fmt::format("{} has {}", is_keyword ? argument->name : name_of(variant, i - keywords), why);
    else
      given.tensors[i] = in_example_layout(given.tensors[i], traced.geometry(value));
  }
  return given;
}

const TracedStage::Variant& TracedStage::choose(const Tree& args, const Tree& kwargs, Given& given) const {
  std::string why_not;
  for (const Variant& variant : variants_) {
    if (!in_mode_of(*variant.traced)) continue;
    given = given_to(variant, args, kwargs);
    if (given.why_not.empty()) return variant;
    if (why_not.empty()) why_not = given.why_not;
  }
  if (why_not.empty()) {
    const std::string& reason = state_of(pipe_).why_no_evaluation;
    throw ValueError(fmt::format(
        "stage {} of a traced pipeline: its modules are in a mode that was not traced{}; trace the "
        "model in this mode, or set its modules with train() and eval() as they were",
        stage_, reason.empty() ? std::string() : fmt::format(" (evaluation: {})", reason)));
  }
  throw ValueError(
      fmt::format("stage {} of a traced pipeline: {}; pass microbatches like the example, or trace an "
                  "example of them, too "
                  "(TraceOptions::more)",
                  stage_, why_not));
}

Tree TracedStage::forward(const Tree& args, const Tree& kwargs) const {
  Given given;
  const Variant& variant = choose(args, kwargs, given);
  std::vector<at::Tensor> inputs;
  inputs.reserve(variant.state.size() + given.tensors.size());
  for (const std::size_t index : variant.state) inputs.push_back(tensors_[index]);
  std::move(given.tensors.begin(), given.tensors.end(), std::back_inserter(inputs));
  given.tensors.clear();
  const std::vector<c10::IValue> results = variant.replay.run(std::move(inputs));
  std::vector<Tree> leaves = graph::leaves_of_values(std::span(results));
  if (is_last()) return unflatten_tree(std::move(leaves), variant.traced->result);
  if (variant.cut->main_outputs.empty()) leaves.insert(leaves.begin(), Tree(nothing_to_send(device_)));
  return Tree::tuple(std::move(leaves));
}

at::Tensor TracedStage::example(const PipeVariant& traced, ValueId value) const {
  const graph::Geometry& geometry = traced.geometry(value);
  at::Tensor made =
      at::empty_strided(geometry.sizes, geometry.strides, at::device(at::kMeta).dtype(geometry.dtype));
  const bool differentiable = at::isFloatingType(geometry.dtype) || at::isComplexType(geometry.dtype);
  return made.set_requires_grad(differentiable && traced.trace.requires_grad[graph::index_of(value)] != 0);
}

std::vector<at::Tensor> TracedStage::example_inputs() const {
  const Variant& variant = variants_.front();
  std::vector<at::Tensor> examples;
  if (!is_first() && variant.cut->main_inputs.empty()) examples.push_back(nothing_to_send(at::kMeta));
  for (const ValueId value : variant.received) examples.push_back(example(*variant.traced, value));
  return examples;
}

std::vector<at::Tensor> TracedStage::example_outputs() const {
  const Variant& variant = variants_.front();
  std::vector<at::Tensor> examples;
  if (is_last()) {
    for (const graph::Operand& output : variant.traced->trace.graph.outputs)
      if (output.value() != graph::kNoValue) examples.push_back(example(*variant.traced, output.value()));
    return examples;
  }
  if (variant.cut->main_outputs.empty()) examples.push_back(nothing_to_send(at::kMeta));
  for (const auto* values : {&variant.cut->main_outputs, &variant.cut->skip_outputs})
    for (const ValueId value : *values) examples.push_back(example(*variant.traced, value));
  return examples;
}

}  // namespace penstock
