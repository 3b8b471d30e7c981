#include "penstock/graph/run/captured_call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/run/captured_node.h"

namespace penstock::graph {
namespace {

std::vector<at::Tensor> tensors_among(const Values& values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values)
    if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
  return tensors;
}

// Another tensor over the same memory, sharing the version counter.
at::Tensor share_storage(const at::Tensor& tensor) {
  const auto& impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace

CapturedCall::CapturedCall(const Function& function, const Values& inputs, const Convention& convention)
    : guard(inputs, convention),
      user_meta(initial_analysis(function, inputs, convention)),
      plan(inputs, user_meta, convention) {
  const Function inner = plan.inner_function(function);
  const Values inner_inputs = plan.inner_inputs(inputs);
  meta =
      plan.is_identity() ? user_meta : analyze(inner, inner_inputs, {.convention = plan.inner_convention()});
  joint = early_joint_ && plan.is_identity()
              ? std::move(*early_joint_)
              : capture_joint(inner, inner_inputs, meta, plan.inner_convention());
  early_joint_.reset();
  for (std::size_t i = 0; i < meta.mutated_at_run_time().size(); ++i)
    geometry_after.push_back(joint.graph[joint.graph.outputs[joint.first_output(i)].value()].geometry);
  find_written_primals(inner_inputs);
  for (std::size_t i = 0; i < joint.forward_outputs; ++i) {
    const ValueId value = joint.graph.outputs[i].value();
    memory_of_output_.push_back(value == kNoValue ? StorageId{-1} : joint.graph[value].storage);
  }
  for (const std::size_t primal : joint.written_in_backward)
    check_written_in_backward(primal, tensors_among(inner_inputs));
  joint.graph = functionalize(std::move(joint.graph), joint.forward_outputs);
  remove_dead_nodes(joint.graph);
}

// What backward writes is known only after duplicate inputs were removed.
void CapturedCall::check_written_in_backward(std::size_t primal,
                                             const std::vector<at::Tensor>& primals) const {
  const std::string& name = joint.graph.inputs[primal].name;
  for (std::size_t i = 0; i < primals.size(); ++i)
    if (i != primal && primals[i].is_alias_of(primals[primal]))
      throw NotImplemented(fmt::format("graph: backward writes {}, which shares memory with {}; pass a copy",
                                       name, joint.graph.inputs[i].name));
  if (overlaps_itself(geometry_of(primals[primal])))
    throw NotImplemented(
        fmt::format("graph: {} has elements that share memory (expand, unfold), and backward writes it; pass "
                    "a contiguous copy",
                    name));
}

void CapturedCall::make_ready(Partitioner partitioner) {
  halves = partitioner == Partitioner::MinCut ? partition_min_cut(joint) : partition_default(joint);
  if (joint.subclasses) {
    subclasses_ = c10::make_intrusive<SubclassCall>(SubclassCall::Context{
        joint, halves, meta, plan.inner_convention(), primal_written, primal_shares_changed});
    return;
  }
  forward.emplace(halves.forward);
  backward.emplace(halves.backward);
  plan_returned();
  plan_saved();
  count_symbols_for_backward();
}

void CapturedCall::count_symbols_for_backward() {
  std::size_t count = 0;
  if (const SymbolicTable* table = joint.graph.table.get()) {
    std::vector<char> used(table->symbols.symbols(), 0);
    const auto use = [&](const SizeExpression& expression) {
      for (std::size_t variable = 0; variable < table->symbols.variables(); ++variable)
        for (std::size_t symbol = 0; symbol < used.size(); ++symbol)
          if (expression.uses(variable) && table->symbols.depends(variable, symbol)) used[symbol] = 1;
    };
    for (const Node& node : halves.backward.nodes)
      for (const Operand& operand : node.arguments)
        if (operand.symbolic != kNotSymbolic)
          for (const NumberOrSize& number :
               table->constants[static_cast<std::size_t>(operand.symbolic)].numbers)
            use(std::holds_alternative<SizeExpression>(number) ? std::get<SizeExpression>(number)
                                                               : std::get<NumberExpression>(number).size);
    for (const TangentInfo& tangent : joint.tangents)
      if (tangent.geometry.symbolic != kNotSymbolic) {
        const SymbolicGeometry& geometry =
            table->geometries[static_cast<std::size_t>(tangent.geometry.symbolic)];
        for (const auto& expressions : {geometry.sizes, geometry.strides})
          for (const auto& expression : expressions)
            if (expression) use(*expression);
      }
    count = static_cast<std::size_t>(std::count(used.begin(), used.end(), char{1}));
  }
  user_meta.symbols_for_backward = meta.symbols_for_backward = count;
}

ViewAndMutationMeta CapturedCall::initial_analysis(const Function& function, const Values& inputs,
                                                   const Convention& convention) {
  if (guard.inputs_share_memory()) {
    ViewAndMutationMeta shared = analyze(function, inputs, {.convention = convention});
    reject_shared_writes(inputs, shared, convention);
    return shared;
  }
  // What the inputs become is known only after analyzing the function (input_plan.h).
  for (const c10::IValue& input : inputs)
    if (input.isTensor() && input.toTensor().defined() &&
        (input.toTensor().is_conj() || input.toTensor().is_neg()))
      return analyze(function, inputs, {.convention = convention});
  AnalyzedCapture captured = analyze_and_capture(function, inputs, convention);
  early_joint_ = std::move(captured.joint);
  return std::move(captured.meta);
}

void CapturedCall::plan_returned() {
  const std::size_t mutated = meta.mutated_at_run_time().size();
  std::vector<char> differentiated(joint.forward_outputs, 0);
  for (const TangentInfo& tangent : joint.tangents) differentiated[meta.forward_return_of(tangent)] = 1;
  for (std::size_t i = 0; i < joint.forward_outputs; ++i) {
    const ValueId value = joint.graph.outputs[i].value();
    if (value == kNoValue) continue;
    if (i >= mutated && i < mutated + meta.outputs.size() && meta.outputs[i - mutated].same_as) continue;
    bool held_twice = false;
    for (std::size_t j = 0; j < joint.primals; ++j) held_twice |= joint.graph.inputs[j].value == value;
    std::optional<std::size_t> shares;
    for (const Returned& earlier : returned) {
      if (joint.graph.outputs[earlier.output].value() != value) continue;
      held_twice = true;
      if (!shares && i >= mutated && earlier.output >= mutated &&
          memory_of_output_[i] == memory_of_output_[earlier.output])
        shares = earlier.output;
    }
    returned.push_back({i, differentiated[i] != 0, held_twice, shares});
  }
  for (const TangentInfo& tangent : joint.tangents) {
    const std::size_t output = meta.forward_return_of(tangent);
    const auto place = std::find_if(returned.begin(), returned.end(),
                                    [&](const Returned& item) { return item.output == output; });
    PENSTOCK_INVARIANT(place != returned.end(), "a tangent belongs to a result that is not returned");
    returned_of_tangent.push_back(static_cast<std::size_t>(place - returned.begin()));
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
    primal_written.push_back(changed.back() && meta.inputs[i].mutates_data);
  }
  // Changing a tensor, even only its metadata, increments the version of all tensors that share its memory.
  for (std::size_t i = 0; i < primals.size(); ++i) {
    bool shares = false;
    for (std::size_t j = 0; j < primals.size(); ++j)
      shares |= changed[j] && primals[i].is_alias_of(primals[j]);
    primal_shares_changed.push_back(shares);
  }
}

void CapturedCall::plan_saved() {
  const Graph& graph = joint.graph;
  for (const ValueId value : halves.saved) {
    Saved how;
    for (std::size_t i = 0; i < joint.primals; ++i) {
      const ValueId input = graph.inputs[i].value;
      if (graph[input].storage != graph[value].storage) continue;
      if (primal_written[i])
        how.how = Saved::How::Copied;
      else if (primal_shares_changed[i])
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

std::vector<at::Tensor> CapturedCall::run_forward(const std::vector<at::Tensor>& primals,
                                                  const c10::intrusive_ptr<BoundSizes>& sizes) {
  if (subclasses_) return subclasses_->run(primals);
  std::vector<at::Tensor> results(joint.forward_outputs);
  const auto keep = [&](const std::vector<c10::IValue>& values) {
    for (const Returned& item : returned) {
      at::Tensor result = values[item.output].toTensor();
      if (item.shares)
        result = share_storage(results[*item.shares]);
      else if (item.copied)
        result = copy_keeping_lazy_bits(result);
      else if (std::any_of(primals.begin(), primals.end(),
                           [&](const at::Tensor& primal) { return primal.is_same(result); }))
        // A kernel returned its argument: an input must not become a result of the function.
        result = result.variable_data();
      results[item.output] = std::move(result);
    }
  };
  if (joint.tangents.empty()) {
    keep((*forward)(primals, sizes.get()));
    return results;
  }
  const auto node = make_node<CapturedNode>(c10::intrusive_ptr<CapturedCall>::reclaim_copy(this), sizes);
  node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(primals)));
  std::vector<c10::IValue> values = (*forward)(primals, sizes.get());
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    keep(values);
  }
  for (std::size_t i = 0; i < returned_of_tangent.size(); ++i)
    torch::autograd::set_history(results[returned[returned_of_tangent[i]].output], NodePtr(node));
  node->save_all(values, primals, results);
  for (const std::size_t primal : joint.written_in_backward) node->write_in_backward(primals[primal]);
  return results;
}

void CapturedCall::write_inputs(const Values& inner, const std::vector<at::Tensor>& results,
                                const BoundSizes* sizes) const {
  const std::vector<std::size_t> mutated = meta.mutated_at_run_time();
  for (std::size_t i = 0; i < mutated.size(); ++i) {
    const InputInfo& info = meta.inputs[mutated[i]];
    const at::Tensor& input = inner[mutated[i]].toTensor();
    const at::Tensor& after = results[i];
    // Mutations that were hidden from autograd in the function are hidden here as well. Autograd always sees
    // a change of the shape, except on a leaf, where it would reject it: then it was made under no_grad.
    const bool leaf_with_grad = info.is_leaf && input.requires_grad();
    const bool unseen = info.mutations_under_no_grad || leaf_with_grad;
    const LayoutInCall layout = layout_in_call(geometry_after[i], sizes);
    // The data first: autograd could not track a write to a view whose shape was changed.
    if (info.mutates_data) {
      const auto place = [&](const at::Tensor& memory) {
        return info.mutates_metadata ? memory.as_strided(layout.sizes, layout.strides, layout.storage_offset)
                                     : memory;
      };
      const c10::AutoGradMode mode(!unseen && c10::GradMode::is_enabled());
      place(unseen && !info.mutations_under_no_grad ? input.detach() : input).copy_(after);
    }
    if (info.mutates_metadata) {
      const c10::AutoGradMode mode(!leaf_with_grad && c10::GradMode::is_enabled());
      input.as_strided_(layout.sizes, layout.strides, layout.storage_offset);
    }
  }
}

Values CapturedCall::make_outputs(const Values& inputs, const Values& inner,
                                  const std::vector<at::Tensor>& results, const BoundSizes* sizes) const {
  const std::size_t mutated = meta.mutated_at_run_time().size();
  const auto view_of = [&](at::Tensor base, const OutputInfo& info) {
    const c10::AutoGradMode mode(info.requires_grad_for_backward);
    if (!info.requires_grad) base = base.detach();
    if (!info.by_geometry) return info.view.apply(std::move(base), sizes);
    const LayoutInCall layout = layout_in_call(info.geometry, sizes);
    return base.as_strided(layout.sizes, layout.strides, layout.storage_offset);
  };
  const auto constant_of = [&](const Operand& operand) {
    return operand.symbolic == kNotSymbolic ? operand.constant
                                            : sizes->constants[static_cast<std::size_t>(operand.symbolic)];
  };
  Values outputs(meta.outputs.size());
  const auto fresh = [&](std::size_t i) {
    const at::Tensor& result = results[mutated + i];
    if (meta.outputs[i].requires_grad && !meta.outputs[i].requires_grad_for_backward)
      result.set_requires_grad(true);
    return result;
  };
  for (std::size_t i = 0; i < meta.outputs.size(); ++i) {
    const OutputInfo& info = meta.outputs[i];
    if (info.type != OutputType::Tensor)
      outputs[i] = constant_of(joint.graph.outputs[joint.first_output(mutated + i)]);
    else if (info.same_as)
      outputs[i] = c10::IValue();
    else if (is_fresh(info.kind))
      outputs[i] = fresh(i);
  }
  // Views of other results come after those; a detached twin comes last, since its base may be such a view.
  const auto round_of = [](const OutputInfo& info) {
    if (info.kind != OutputKind::AliasOfIntermediateBaseIsUserOutput) return 0;
    return info.requires_grad ? 1 : 2;
  };
  for (int round = 0; round < 3; ++round)
    for (std::size_t i = 0; i < meta.outputs.size(); ++i) {
      const OutputInfo& info = meta.outputs[i];
      if (info.type != OutputType::Tensor || info.same_as || round_of(info) != round) continue;
      switch (info.kind) {
        case OutputKind::NonAlias:
        case OutputKind::UnsafeViewAlias:
        case OutputKind::CustomFunctionView:
          break;
        case OutputKind::IsInput:
        case OutputKind::AliasOfInput: {
          // As in the original call: an input that was merged with others is itself again.
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

Values CapturedCall::run(const Values& inputs, const c10::intrusive_ptr<BoundSizes>& sizes) {
  const Values inner = plan.inner_inputs(inputs);
  const std::vector<at::Tensor> results = run_forward(tensors_among(inner), sizes);
  write_inputs(inner, results, sizes.get());
  // An input that was written through another tensor of its memory gets its gradient function lazily, when it
  // is queried, and looks like a leaf until then.
  if (!plan.is_identity())
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (user_meta.inputs[i].mutates_data && user_meta.inputs[i].is_tensor) inputs[i].toTensor().grad_fn();
  Values outputs = make_outputs(inputs, inner, results, sizes.get());
  if (meta.grad_mode_after) c10::GradMode::set_enabled(*meta.grad_mode_after);
  return outputs;
}

}  // namespace penstock::graph
