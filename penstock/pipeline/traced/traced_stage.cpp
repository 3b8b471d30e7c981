#include "penstock/pipeline/traced/traced_stage.h"

#include <ATen/ATen.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/run/leaf_values.h"
#include "penstock/graph/stages/lost_gradients.h"
#include "penstock/pipeline/traced/same_program.h"
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

std::string text_of(const AutocastState& state) {
  if (!state.cpu && !state.cuda) return "off";
  const auto on = [](const char* device, at::ScalarType dtype) {
    return fmt::format("{} on {}", c10::toString(dtype), device);
  };
  return fmt::format("{}{}{}{}", state.cpu ? on("cpu", state.cpu_dtype) : "",
                     state.cpu && state.cuda ? " and " : "", state.cuda ? on("cuda", state.cuda_dtype) : "",
                     state.cached ? ", with cached weights" : "");
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
  for (const PipeVariant& traced : state_of(pipe_).variants) {
    Variant variant = make_variant(traced, device);
    variant.program = variants_.size();
    for (const Variant& known : variants_)
      if (same_stage(*known.traced, traced, static_cast<std::size_t>(stage_))) {
        variant.program = known.program;
        break;
      }
    variants_.push_back(std::move(variant));
  }
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
  return {&traced, &cut, cut.state, std::move(received), graph::NodeReplay(traced.trace, part), 0};
}

bool TracedStage::in_mode_of(const PipeVariant& traced) const {
  for (std::size_t i = 0; i < tree_.modules.size(); ++i)
    if (tree_.modules[i] && !traced.any_mode[i] && tree_.modules[i]->is_training() != traced.training[i])
      return false;
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
  const auto is_passed = [&](const std::string& path) {
    const std::string name = keyword_of(path);
    return std::find(kwargs.keys().begin(), kwargs.keys().end(), name) != kwargs.keys().end();
  };
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const Tree& leaf = traced.leaves[first_leaf + i];
    const bool was_tensor = std::any_of(
        graph.inputs.begin() + static_cast<std::ptrdiff_t>(traced.trace.found), graph.inputs.end(),
        [&](const graph::Placeholder& input) { return input.name == paths[i]; });
    const auto found = by_path.find(paths[i]);
    if (found == by_path.end()) {
      // One that is not passed at all may be any. Nothing and None are the same.
      if (is_passed(paths[i]) && (was_tensor || !leaf.is_none()))
        given.why_not = fmt::format("{} is of another structure than in the example, which has {}",
                                    fmt::format("kwargs['{}']", keyword_of(paths[i])), paths[i]);
    } else if (was_tensor ? !found->second.is_tensor() : !same_leaf(found->second, leaf)) {
      given.why_not = fmt::format("{} is {}, in the example {}", paths[i], found->second.to_string(),
                                  was_tensor ? std::string("a tensor") : leaf.to_string());
    }
  }
  for (const auto& [path, leaf] : by_path)
    if (!leaf.is_none() && std::find(paths.begin(), paths.end(), path) == paths.end())
      given.why_not = fmt::format("{} is not in the example", path);
  for (const std::size_t input : variant.cut->keywords) {
    const auto found = by_path.find(graph.inputs[input].name);
    if (found == by_path.end() && given.missing.empty()) given.missing = graph.inputs[input].name;
    given.tensors.push_back(found != by_path.end() && found->second.is_tensor() ? found->second.tensor()
                                                                                : at::Tensor());
  }
}

ValueId TracedStage::value_of(const Variant& variant, std::size_t given) {
  const std::vector<std::size_t>& keywords = variant.cut->keywords;
  return given < keywords.size() ? variant.traced->trace.graph.inputs[keywords[given]].value
                                 : variant.received[given - keywords.size()];
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
    if (is_keyword && !given.tensors[i].defined()) continue;  // missing
    const graph::Placeholder* argument =
        is_keyword ? &traced.trace.graph.inputs[variant.cut->keywords[i]] : nullptr;
    const std::string why = misfit(given.tensors[i], traced.geometry(value_of(variant, i)));
    if (!why.empty())
      given.why_not =
          fmt::format("{} has {}", is_keyword ? argument->name : name_of(variant, i - keywords), why);
  }
  return given;
}

void TracedStage::check_surroundings() const {
  const PipeState& state = state_of(pipe_);
  if (const at::ScalarType dtype = c10::get_default_dtype_as_scalartype(); dtype != state.default_dtype)
    throw ValueError(
        fmt::format("stage {} of a traced pipeline: the default dtype is {}, in the trace it was {}; call "
                    "torch::set_default_dtype before trace_pipeline, and leave it so",
                    stage_, c10::toString(dtype), c10::toString(state.default_dtype)));
  const AutocastState now = autocast_state();
  const AutocastState& traced = state.autocast;
  if (now == traced) return;
  throw ValueError(
      fmt::format("stage {} of a traced pipeline: autocast is {}, in the trace it was {}; run steps under "
                  "the autocast that "
                  "was on around trace_pipeline, or let the forward of the model set it",
                  stage_, text_of(now), text_of(traced)));
}

void TracedStage::refuse_as_ambiguous(const Variant& one, const Variant& other) const {
  const std::vector<std::string> names = telling_keywords(*one.traced, *other.traced);
  throw ValueError(fmt::format(
      "stage {} of a traced pipeline: what it is given fits several examples, for which it computes "
      "something "
      "else; {}",
      stage_,
      names.empty()
          ? std::string("trace them as pipelines of their own")
          : fmt::format("pass the keyword arguments {} to `step` on the rank of this stage, too, as "
                        "None where an example has none (Pipe::keywords)",
                        fmt::join(names, ", "))));
}

const TracedStage::Variant& TracedStage::choose(const Tree& args, const Tree& kwargs, Given& given) const {
  check_surroundings();
  std::string why_not, missing;
  const Variant* chosen = nullptr;
  for (const Variant& variant : variants_) {
    if (!in_mode_of(*variant.traced) || (chosen && chosen->program == variant.program)) continue;
    Given own = given_to(variant, args, kwargs);
    if (!own.why_not.empty()) {
      if (why_not.empty()) why_not = std::move(own.why_not);
      if (missing.empty() && !own.missing.empty())
        missing = fmt::format(
            ", and {} is not passed, which this stage uses in an example (Pipe::keywords has its keyword "
            "arguments)",
            own.missing);
      continue;
    }
    if (chosen) refuse_as_ambiguous(*chosen, variant);
    chosen = &variant;
    given = std::move(own);
  }
  if (chosen) {
    if (!given.missing.empty())
      throw ValueError(describe(fmt::format("stage {}: {}", stage_, given.missing), "nothing",
                                "a tensor, which this stage uses",
                                "pass keyword arguments to `step` on every rank whose stages use them "
                                "(Pipe::keywords)"));
    for (std::size_t i = 0; i < given.tensors.size(); ++i)
      given.tensors[i] = in_example_layout(given.tensors[i], chosen->traced->geometry(value_of(*chosen, i)));
    return *chosen;
  }
  if (why_not.empty()) {
    const std::string& reason = state_of(pipe_).why_no_evaluation;
    throw ValueError(fmt::format(
        "stage {} of a traced pipeline: its modules are in a mode that was not traced{}; trace the "
        "model in this mode, or set its modules with train() and eval() as they were",
        stage_, reason.empty() ? std::string() : fmt::format(" (evaluation: {})", reason)));
  }
  throw ValueError(
      fmt::format("stage {} of a traced pipeline: {}{}; pass microbatches like the example, or trace an "
                  "example of them, too "
                  "(TraceOptions::more)",
                  stage_, why_not, missing));
}

void TracedStage::refuse_lost_gradients(const Variant& variant, const std::vector<at::Tensor>& inputs) const {
  if (!c10::GradMode::is_enabled()) return;
  const graph::ForwardTrace& trace = variant.traced->trace;
  const std::size_t found = variant.state.size(), keywords = variant.cut->keywords.size();
  std::vector<std::size_t> added;  // inputs that required no gradient in the trace
  std::vector<ValueId> values;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const ValueId value =
        i < found ? trace.graph.inputs[variant.state[i]].value : value_of(variant, i - found);
    if (!inputs[i].requires_grad() || trace.requires_grad[graph::index_of(value)] != 0) continue;
    added.push_back(i);
    values.push_back(value);
  }
  if (!graph::first_without_derivative(trace, *variant.cut, values)) return;
  for (std::size_t k = 0; k < added.size(); ++k) {
    const auto node = graph::first_without_derivative(trace, *variant.cut, {values[k]});
    if (!node) continue;
    const std::size_t i = added[k];
    throw ValueError(fmt::format(
        "stage {} of a traced pipeline: {} requires a gradient, in the trace it did not, and '{}' was "
        "recorded without a derivative (a torch::autograd::Function, or NoGradGuard), so that the gradient "
        "would be lost; trace the model again after requires_grad_(true)",
        stage_,
        i < found              ? fmt::format("'{}'", state_of(pipe_).names[variant.state[i]])
        : i < found + keywords ? trace.graph.inputs[variant.cut->keywords[i - found]].name
                               : name_of(variant, i - found - keywords),
        trace.line(*node)));
  }
}

Tree TracedStage::forward(const Tree& args, const Tree& kwargs) const {
  Given given;
  const Variant& variant = choose(args, kwargs, given);
  std::vector<at::Tensor> inputs;
  inputs.reserve(variant.state.size() + given.tensors.size());
  for (const std::size_t index : variant.state) inputs.push_back(tensors_[index]);
  std::move(given.tensors.begin(), given.tensors.end(), std::back_inserter(inputs));
  given.tensors.clear();
  refuse_lost_gradients(variant, inputs);
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
