#include "penstock/graph/captured_call.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "penstock/base/errors.h"
#include "penstock/graph/functionalize.h"
#include "penstock/torch/wrapper.h"

namespace penstock::graph {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kCall = "call";
constexpr const char* kDeterministic = "deterministic";

std::vector<at::Tensor> tensors_among(const Values& values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values)
    if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
  return tensors;
}

at::Tensor tensor_or_none(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }

// The node of autograd that stands for the whole function.
struct GraphFunction : torch::autograd::Function<GraphFunction> {
  static variable_list forward(AutogradContext* context, CapturedCall* call, at::TensorList primals) {
    std::vector<c10::IValue> results = (*call->forward)(primals.vec());
    variable_list outputs, no_gradient, kept;
    for (const CapturedCall::Returned& returned : call->returned) {
      at::Tensor output = results[returned.output].toTensor();
      if (returned.copied) output = output.clone();
      if (!returned.needs_grad) no_gradient.push_back(output);
      outputs.push_back(std::move(output));
    }
    const auto output_at = [&](std::size_t place) -> const at::Tensor& {
      for (std::size_t i = 0; i < call->returned.size(); ++i)
        if (call->returned[i].output == place) return outputs[i];
      throw InvariantError("graph: a saved value lies in an output that is not returned");
    };
    variable_list watched;
    for (std::size_t i = 0; i < call->saved.size(); ++i) {
      const CapturedCall::Saved& saved = call->saved[i];
      at::Tensor tensor = results[call->joint.forward_outputs + i].toTensor();
      if (!tensor.defined()) {
        kept.emplace_back();
        continue;
      }
      if (saved.how == CapturedCall::Saved::How::Copied) tensor = tensor.clone();
      if (saved.how == CapturedCall::Saved::How::Unwatched) tensor = tensor.variable_data();
      kept.push_back(std::move(tensor));
      if (saved.watch_primal) watched.push_back(primals[*saved.watch_primal]);
      if (saved.watch_output) watched.push_back(output_at(*saved.watch_output));
    }
    kept.insert(kept.end(), watched.begin(), watched.end());
    context->save_for_backward(std::move(kept));
    context->mark_non_differentiable(no_gradient);
    context->saved_data[kDeterministic] = at::globalContext().deterministicAlgorithms();
    context->saved_data[kCall] = c10::IValue::make_capsule(c10::intrusive_ptr<torch::CustomClassHolder>::reclaim_copy(call));
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (c10::GradMode::is_enabled())
      throw NotImplemented("graph: the backward of a captured function cannot be differentiated; call backward without create_graph, or the "
                           "function itself");
    if (at::globalContext().deterministicAlgorithms() && !context->saved_data.at(kDeterministic).toBool())
      throw StateError("graph: deterministic algorithms are asked for in backward, but were not when forward ran; switch them on before both");
    const c10::intrusive_ptr<torch::CustomClassHolder> holder = context->saved_data.at(kCall).toCapsule();
    const auto* call = static_cast<const CapturedCall*>(holder.get());
    // Looks whether a saved or watched tensor was written, too.
    std::vector<at::Tensor> inputs = context->get_saved_variables();
    inputs.resize(call->saved.size());
    for (std::size_t i = 0; i < call->tangent_place.size(); ++i)
      inputs.push_back(tangent(gradients[call->tangent_place[i]], call->joint.tangents[i].geometry));
    gradients.clear();
    variable_list results{at::Tensor()};  // of `call`
    for (const c10::IValue& gradient : (*call->backward)(std::move(inputs))) results.push_back(tensor_or_none(gradient));
    return results;
  }

  // Laid out as when backward was captured: it may view it.
  static at::Tensor tangent(const at::Tensor& gradient, const Geometry& geometry) {
    if (is_wrapper(gradient))
      throw TypeError(describe("graph: a gradient of a captured function", "a tensor of kind " + std::string(payload_of(gradient)->kind()), "a plain tensor",
                               "give backward a gradient like the result"));
    if (gradient.sizes() != at::IntArrayRef(geometry.sizes) || gradient.scalar_type() != geometry.dtype)
      throw ValueError(fmt::format("graph: a gradient has {} elements of {}, expected {} of {}; give backward gradients like the results",
                                   gradient.numel(), c10::toString(gradient.scalar_type()), geometry.numel(), c10::toString(geometry.dtype)));
    if (gradient.strides() == at::IntArrayRef(geometry.strides)) return gradient;
    return at::empty_strided(geometry.sizes, geometry.strides, gradient.options()).copy_(gradient);
  }
};

}  // namespace

CapturedCall::CapturedCall(const Function& function, const Values& inputs, const CompileOptions& options, const Convention& convention)
    : guard(inputs, convention), user_meta(first_look(function, inputs, convention)), plan(inputs, user_meta, convention) {
  const Function inner = plan.inner_function(function);
  const Values inner_inputs = plan.inner_inputs(inputs);
  meta = plan.is_identity() ? user_meta : analyze(inner, inner_inputs, {.convention = plan.inner_convention()});
  joint = early_joint_ && plan.is_identity() ? std::move(*early_joint_) : capture_joint(inner, inner_inputs, meta, plan.inner_convention());
  early_joint_.reset();
  for (std::size_t i = 0; i < meta.mutated_at_run_time().size(); ++i)
    geometry_after_.push_back(joint.graph[joint.graph.outputs[i].value()].geometry);
  find_written_primals(inner_inputs);
  joint.graph = functionalize(std::move(joint.graph));
  remove_dead_nodes(joint.graph);
  halves = options.partitioner == Partitioner::MinCut ? partition_min_cut(joint) : partition_default(joint);
  forward.emplace(halves.forward);
  backward.emplace(halves.backward, Executor::Inputs::MayBeUndefined);
  plan_returned();
  plan_saved();
}

ViewAndMutationMeta CapturedCall::first_look(const Function& function, const Values& inputs, const Convention& convention) {
  if (guard.inputs_share_memory()) return analyze(function, inputs, {.convention = convention});
  AnalyzedCapture captured = analyze_and_capture(function, inputs, convention);
  early_joint_ = std::move(captured.joint);
  return std::move(captured.meta);
}

std::size_t CapturedCall::output_of(const TangentInfo& tangent) const {
  const std::vector<std::size_t> mutated = meta.mutated_at_run_time();
  switch (tangent.kind) {
    case TangentInfo::Kind::MutatedInput:
      return static_cast<std::size_t>(std::find(mutated.begin(), mutated.end(), tangent.index) - mutated.begin());
    case TangentInfo::Kind::Output: return mutated.size() + tangent.index;
    case TangentInfo::Kind::IntermediateBase: return mutated.size() + meta.outputs.size() + tangent.index;
  }
  throw InvariantError("graph: a tangent of unknown kind");
}

void CapturedCall::plan_returned() {
  const std::size_t mutated = meta.mutated_at_run_time().size();
  std::vector<char> differentiated(joint.forward_outputs, 0);
  for (const TangentInfo& tangent : joint.tangents) differentiated[output_of(tangent)] = 1;
  for (std::size_t i = 0; i < joint.forward_outputs; ++i) {
    const ValueId value = joint.graph.outputs[i].value();
    if (value == kNoValue) continue;
    if (i >= mutated && i < mutated + meta.outputs.size() && meta.outputs[i - mutated].same_as) continue;
    bool held_twice = false;
    for (std::size_t j = 0; j < joint.primals; ++j) held_twice |= joint.graph.inputs[j].value == value;
    for (const Returned& earlier : returned) held_twice |= joint.graph.outputs[earlier.output].value() == value;
    returned.push_back({i, differentiated[i] != 0, held_twice});
  }
  for (const TangentInfo& tangent : joint.tangents) {
    const std::size_t output = output_of(tangent);
    const auto place = std::find_if(returned.begin(), returned.end(), [&](const Returned& item) { return item.output == output; });
    PENSTOCK_INVARIANT(place != returned.end(), "a tangent belongs to a result that is not returned");
    tangent_place.push_back(static_cast<std::size_t>(place - returned.begin()));
  }
}

void CapturedCall::find_written_primals(const Values& inner) {
  const std::vector<std::size_t> mutated = meta.mutated_at_run_time();
  std::vector<at::Tensor> primals;
  std::vector<char> changed;
  for (std::size_t i = 0; i < inner.size(); ++i) {
    if (!inner[i].isTensor() || !inner[i].toTensor().defined()) continue;
    primals.push_back(inner[i].toTensor());
    changed.push_back(std::find(mutated.begin(), mutated.end(), i) != mutated.end());
    primal_written_.push_back(changed.back() && meta.inputs[i].mutates_data);
  }
  // Changing a tensor, even its metadata alone, raises the version of all that share its memory.
  for (std::size_t i = 0; i < primals.size(); ++i) {
    bool shares = false;
    for (std::size_t j = 0; j < primals.size(); ++j) shares |= changed[j] && primals[i].is_alias_of(primals[j]);
    primal_shares_changed_.push_back(shares);
  }
}

void CapturedCall::plan_saved() {
  const Graph& graph = joint.graph;
  for (const ValueId value : halves.saved) {
    Saved how;
    for (std::size_t i = 0; i < joint.primals; ++i) {
      const ValueId input = graph.inputs[i].value;
      if (graph[input].storage != graph[value].storage) continue;
      if (primal_written_[i])
        how.how = Saved::How::Copied;
      else if (primal_shares_changed_[i])
        how.how = Saved::How::Unwatched;
      else if (input != value)
        how.watch_primal = i;
      break;
    }
    if (how.how == Saved::How::AsIs && !how.watch_primal)
      for (const Returned& item : returned) {
        const ValueId output = graph.outputs[item.output].value();
        if (item.copied || output == value || graph[output].storage != graph[value].storage) continue;
        how.watch_output = item.output;
        break;
      }
    saved.push_back(how);
  }
}

std::vector<at::Tensor> CapturedCall::run_forward(const std::vector<at::Tensor>& primals) {
  std::vector<at::Tensor> results(joint.forward_outputs);
  if (joint.tangents.empty()) {
    std::vector<c10::IValue> values = (*forward)(primals);
    for (const Returned& item : returned) {
      const at::Tensor& result = values[item.output].toTensor();
      results[item.output] = item.copied ? result.clone() : result;
    }
  } else {
    variable_list outputs = GraphFunction::apply(this, at::TensorList(primals));
    for (std::size_t i = 0; i < returned.size(); ++i) results[returned[i].output] = std::move(outputs[i]);
  }
  return results;
}

void CapturedCall::write_inputs(const Values& inner, const std::vector<at::Tensor>& results) const {
  const std::vector<std::size_t> mutated = meta.mutated_at_run_time();
  for (std::size_t i = 0; i < mutated.size(); ++i) {
    const InputInfo& info = meta.inputs[mutated[i]];
    const at::Tensor& input = inner[mutated[i]].toTensor();
    const at::Tensor& after = results[i];
    // What the function did unseen by autograd is done so here. A change of the shape autograd always sees, except on a leaf, where
    // it would refuse it: then it was made under no_grad.
    const bool leaf_with_grad = info.is_leaf && input.requires_grad();
    const bool unseen = info.mutations_under_no_grad || leaf_with_grad;
    if (info.mutates_metadata) {
      const Geometry& geometry = geometry_after_[i];
      const c10::AutoGradMode mode(!leaf_with_grad && c10::GradMode::is_enabled());
      input.as_strided_(geometry.sizes, geometry.strides, geometry.storage_offset);
    }
    if (!info.mutates_data) continue;
    if (unseen) {
      const at::NoGradGuard no_grad;
      if (info.mutations_under_no_grad)
        input.copy_(after);
      else
        input.detach().copy_(after);
    } else {
      input.copy_(after);
    }
  }
}

Values CapturedCall::make_outputs(const Values& inputs, const Values& inner, const std::vector<at::Tensor>& results) const {
  const std::size_t mutated = meta.mutated_at_run_time().size();
  const auto view_of = [](at::Tensor base, const OutputInfo& info) {
    const c10::AutoGradMode mode(info.requires_grad);
    if (!info.requires_grad) base = base.detach();
    return base.as_strided(info.geometry.sizes, info.geometry.strides, info.geometry.storage_offset);
  };
  Values outputs(meta.outputs.size());
  const auto fresh = [&](std::size_t i) { return results[mutated + i]; };
  for (std::size_t i = 0; i < meta.outputs.size(); ++i) {
    const OutputInfo& info = meta.outputs[i];
    if (info.type != OutputType::Tensor)
      outputs[i] = joint.graph.outputs[mutated + i].constant;
    else if (info.same_as)
      outputs[i] = c10::IValue();
    else if (is_fresh(info.kind))
      outputs[i] = fresh(i);
  }
  // Views of other results come after those; a detached twin, last, as its base may be such a view.
  const auto round_of = [](const OutputInfo& info) {
    if (info.kind != OutputKind::AliasOfIntermediateBaseIsUserOutput) return 0;
    return info.requires_grad ? 1 : 2;
  };
  for (int round = 0; round < 3; ++round) for (std::size_t i = 0; i < meta.outputs.size(); ++i) {
    const OutputInfo& info = meta.outputs[i];
    if (info.type != OutputType::Tensor || info.same_as || round_of(info) != round) continue;
    switch (info.kind) {
      case OutputKind::NonAlias:
      case OutputKind::UnsafeViewAlias:
      case OutputKind::CustomFunctionView: break;
      case OutputKind::IsInput:
      case OutputKind::AliasOfInput: {
        // As the function was called: an input that was merged with others is itself again.
        const OutputInfo& user = user_meta.outputs[i];
        if (user.kind == OutputKind::IsInput)
          outputs[i] = inputs[*user.base_index];
        else if (user.kind == OutputKind::AliasOfInput)
          outputs[i] = view_of(inputs[*user.base_index].toTensor(), user);
        else
          outputs[i] = view_of(inner[*info.base_index].toTensor(), info);
        break;
      }
      case OutputKind::AliasOfIntermediate:
      case OutputKind::AliasOfIntermediateSaveAsOutput:
        outputs[i] = view_of(results[mutated + meta.outputs.size() + *info.base_index], info);
        break;
      case OutputKind::AliasOfIntermediateBaseIsUserOutput: {
        const std::size_t base = meta.outputs[*info.base_index].same_as.value_or(*info.base_index);
        outputs[i] = view_of(outputs[base].toTensor(), info);
        break;
      }
    }
  }
  for (std::size_t i = 0; i < meta.outputs.size(); ++i)
    if (meta.outputs[i].same_as) outputs[i] = outputs[*meta.outputs[i].same_as];
  return outputs;
}

Values CapturedCall::run(const Values& inputs) {
  const Values inner = plan.inner_inputs(inputs);
  const std::vector<at::Tensor> results = run_forward(tensors_among(inner));
  write_inputs(inner, results);
  Values outputs = make_outputs(inputs, inner, results);
  if (meta.grad_mode_after) c10::GradMode::set_enabled(*meta.grad_mode_after);
  return outputs;
}

// ---- Compiled ----

Compiled::Compiled(Function function, const CompileOptions& options, Convention convention)
    : function_(std::move(function)), options_(options), convention_(std::move(convention)) {}
Compiled::~Compiled() = default;
Compiled::Compiled(Compiled&&) noexcept = default;
Compiled& Compiled::operator=(Compiled&&) noexcept = default;

Values Compiled::operator()(const Values& inputs) {
  for (auto call = calls_.rbegin(); call != calls_.rend(); ++call)
    if ((*call)->guard.holds(inputs)) return (*call)->run(inputs);
  if (!calls_.empty() && !options_.recapture)
    throw StateError(fmt::format("graph: the capture does not hold for this call: {}; call it as it was captured, or set recapture",
                                 calls_.back()->guard.difference(inputs)));
  calls_.push_back(c10::make_intrusive<CapturedCall>(function_, inputs, options_, convention_));
  return calls_.back()->run(inputs);
}

const ViewAndMutationMeta& Compiled::meta(std::size_t capture) const { return calls_.at(capture)->user_meta; }
const ViewAndMutationMeta& Compiled::inner_meta(std::size_t capture) const { return calls_.at(capture)->meta; }
const JointGraph& Compiled::joint(std::size_t capture) const { return calls_.at(capture)->joint; }
const Partition& Compiled::partition(std::size_t capture) const { return calls_.at(capture)->halves; }

}  // namespace penstock::graph
