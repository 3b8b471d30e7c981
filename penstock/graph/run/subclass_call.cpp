#include "penstock/graph/run/subclass_call.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/run/saving_node.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock::graph {
namespace {

using torch::autograd::variable_list;

std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& values, std::size_t first,
                                   std::size_t count) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(count);
  for (std::size_t i = first; i < first + count; ++i)
    tensors.push_back(values[i].isTensor() ? values[i].toTensor() : at::Tensor());
  return tensors;
}

// Has the layout for which backward was captured, because backward may view it.
at::Tensor with_layout(const at::Tensor& gradient, const Geometry& geometry, const std::string& name) {
  if (gradient.sizes() != at::IntArrayRef(geometry.sizes) || gradient.scalar_type() != geometry.dtype)
    throw ValueError(
        describe("graph: the gradient of " + name,
                 fmt::format("{}[{}]", dtype_name(gradient.scalar_type()), fmt::join(gradient.sizes(), ", ")),
                 fmt::format("{}[{}]", dtype_name(geometry.dtype), fmt::join(geometry.sizes, ", ")),
                 "pass gradients that match the results"));
  if (gradient.strides() == at::IntArrayRef(geometry.strides) && !gradient.is_conj() && !gradient.is_neg())
    return gradient;
  return at::empty_strided(geometry.sizes, geometry.strides, gradient.options().requires_grad(false))
      .copy_(gradient);
}

// Appends the plain tensors of a gradient, converted to match the record.
void flatten_gradient(const FlattenRecord& record, const at::Tensor& gradient, const std::string& name,
                      std::vector<at::Tensor>& flat) {
  const Payload* payload = is_subclass(gradient) ? payload_of(gradient) : nullptr;
  const auto refuse = [&] {
    throw TypeError(describe("graph: the gradient of " + name, type_text(gradient),
                             record.is_subclass() ? record.subclass().to_text() : "a plain tensor",
                             "pass a gradient of the same kind as the result"));
  };
  if ((payload != nullptr) != record.is_subclass()) refuse();
  if (!payload) {
    flat.push_back(with_layout(gradient, *record.plain().geometry, name));
    return;
  }
  const SubclassMeta& meta = record.subclass();
  at::Tensor brought = gradient;
  if (!meta.like->same_context(*payload)) brought = payload->with_context_of(gradient, *meta.like);
  if (!brought.defined() || !is_subclass(brought) || !meta.like->same_context(*payload_of(brought))) refuse();
  const auto inner = payload_of(brought)->inner_tensors();
  PENSTOCK_INVARIANT(inner.size() == meta.attributes.size(),
                     "a gradient contains a different number of tensors than its record");
  for (std::size_t i = 0; i < inner.size(); ++i)
    flatten_gradient(meta.attributes[i].second, inner[i].second, name, flat);
}

// The autograd node for the whole function. Its gradients are in the order of the tangents.
class SubclassNode final : public SavingNode {
 public:
  explicit SubclassNode(c10::intrusive_ptr<SubclassCall> call) : call_(std::move(call)) {}

  // Called after the results have their history.
  void save_all(const std::vector<c10::IValue>& values, const std::vector<at::Tensor>& inputs,
                const std::vector<at::Tensor>& outputs) {
    for (std::size_t i = 0; i < call_->saved.size(); ++i) {
      const at::Tensor& tensor = values[call_->forward_outputs + i].toTensor();
      const at::NoGradGuard no_grad;
      // With its own version counter: any write to it is also a write to one of the watched tensors.
      save(call_->saved[i].how == SubclassCall::Saved::How::Copied ? copy_keeping_lazy_bits(tensor.detach())
                                                                   : tensor.variable_data());
    }
    if (call_->run_again) hold_inputs(call_->run_again, inputs, call_->kept_inputs);
    for (const std::size_t input : call_->watched.inputs) watch(inputs[input]);
    for (const std::size_t output : call_->watched.returned) watch(outputs[output]);
  }

 protected:
  variable_list apply(variable_list&& gradients) override {
    if (c10::GradMode::is_enabled()) return gradients_again(gradients);
    std::vector<at::Tensor> inputs = unpack();
    for (std::size_t i = 0; i < gradients.size(); ++i) call_->flatten_tangent(i, gradients[i], inputs);
    gradients.clear();
    give_up();
    return call_->rebuild_gradients(call_->halves.backward->run(std::move(inputs)));
  }

 private:
  c10::intrusive_ptr<SubclassCall> call_;
};

std::string name_of(const TangentInfo& tangent, const Convention& convention) {
  switch (tangent.kind) {
    case TangentInfo::Kind::MutatedInput:
      return fmt::format("{}, which is written", convention.name_of(tangent.index));
    case TangentInfo::Kind::Output:
      return fmt::format("result {}", tangent.index);
    case TangentInfo::Kind::IntermediateBase:
      return fmt::format("base {} of results", tangent.index);
  }
  throw InvariantError("graph: unknown kind of tangent");
}

}  // namespace

void reject_shared_writes(const Values& inputs, const ViewAndMutationMeta& meta,
                          const Convention& convention) {
  const auto tensor_at = [&](std::size_t i) {
    return inputs[i].isTensor() ? inputs[i].toTensor() : at::Tensor();
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor written = tensor_at(i);
    if (!written.defined() || !meta.inputs[i].is_touched) continue;
    for (std::size_t j = 0; j < inputs.size(); ++j) {
      const at::Tensor other = tensor_at(j);
      if (!other.defined() || other.is_same(written) || (!is_subclass(written) && !is_subclass(other)))
        continue;
      bool shared = written.is_alias_of(other);
      for (const at::Tensor& a : plain_parts(written))
        for (const at::Tensor& b : plain_parts(other)) shared |= a.is_alias_of(b);
      if (shared)
        throw NotImplemented(
            fmt::format("graph: {} ({}) is written and shares memory with {} ({}), which is not supported if "
                        "either is a subclass; pass a "
                        "copy",
                        convention.name_of(i), type_text(written), convention.name_of(j), type_text(other)));
    }
  }
}

SubclassCall::SubclassCall(const PartitionedCapture& partitioned, CompiledHalves compiled)
    : halves(std::move(compiled)),
      layout(partitioned.capture.joint.subclasses),
      forward_outputs(partitioned.capture.joint.forward_outputs) {
  plan_returned(partitioned.capture);
  plan_views(partitioned.capture);
  plan_tangents(partitioned.capture);
  plan_saved(partitioned);
  const SecondDerivatives second = partitioned.capture.second_derivatives;
  if (second == SecondDerivatives::Refuse) return;
  run_again = partitioned.capture.run_again;
  kept_inputs.assign(layout->inputs.size(), second == SecondDerivatives::RunAgainKeepingInputs ? 1 : 0);
  for (const std::size_t input : watched.inputs) kept_inputs[input] = 1;
}

void SubclassCall::plan_returned(const FunctionCapture& capture) {
  const Graph& graph = capture.joint.graph;
  const std::size_t mutated = capture.meta.mutated_at_run_time().size(),
                    results = capture.meta.outputs.size();
  for (std::size_t i = 0; i < layout->forward_outputs.size(); ++i) {
    const FlattenRecord& record = layout->forward_outputs[i];
    const ValueId value = graph.outputs[record.first_flat()].value();
    if (value == kNoValue ||
        (i >= mutated && i < mutated + results && capture.meta.outputs[i - mutated].same_as))
      continue;
    Returned item{i, Returned::How::AsIs};
    // A plain tensor that something else holds becomes a separate tensor for autograd. One inside a subclass
    // shares its memory, as in the function.
    if (!record.is_subclass()) {
      for (const FlattenRecord& input : layout->inputs)
        input.for_each_plain([&](const PlainTensorMeta& plain) {
          if (graph.inputs[plain.flat_index].value == value)
            item.how = input.is_subclass() ? Returned::How::Unshared : Returned::How::Copied;
        });
      for (std::size_t other = 0; other < layout->forward_outputs.size(); ++other) {
        const FlattenRecord& theirs = layout->forward_outputs[other];
        if (other == i || (!theirs.is_subclass() && other > i)) continue;
        theirs.for_each_plain([&](const PlainTensorMeta& plain) {
          if (graph.outputs[plain.flat_index].value() == value && item.how != Returned::How::Copied)
            item.how = theirs.is_subclass() ? Returned::How::Unshared : Returned::How::Copied;
        });
      }
    }
    returned.push_back(item);
  }
}

void SubclassCall::plan_views(const FunctionCapture& capture) {
  const Graph& graph = capture.joint.graph;
  for (const FlattenRecord& record : layout->forward_outputs)
    record.for_each_plain([&](const PlainTensorMeta& plain) {
      const auto& input = layout->in_mutated_input[plain.flat_index];
      if (!input) return;
      const Geometry& written = graph[graph.inputs[*input].value].geometry;
      if (written.dtype != plain.geometry->dtype || written.conjugated != plain.geometry->conjugated ||
          written.negated != plain.geometry->negated)
        throw NotImplemented(
            fmt::format("graph: a result shares memory with {}, which is written, and has a different dtype "
                        "or is a conjugate of it; return a clone of it",
                        graph.inputs[*input].name));
      views_.push_back({plain.flat_index, *input, *plain.geometry});
    });
}

void SubclassCall::plan_tangents(const FunctionCapture& capture) {
  for (const FlattenRecord& record : layout->tangents) {
    const TangentInfo& tangent = capture.joint.tangents[record.first_flat()];
    const std::size_t place = capture.meta.forward_return_of(tangent);
    const auto found = std::find_if(returned.begin(), returned.end(),
                                    [&](const Returned& item) { return item.place == place; });
    PENSTOCK_INVARIANT(found != returned.end(), "a tangent belongs to a result that is not returned");
    tangents.push_back(
        {static_cast<std::size_t>(found - returned.begin()), name_of(tangent, capture.convention)});
  }
}

void SubclassCall::plan_saved(const PartitionedCapture& partitioned) {
  const FunctionCapture& capture = partitioned.capture;
  const Graph& graph = capture.joint.graph;
  const auto uses_storage = [&](const FlattenRecord& record, const auto& value_at, StorageId storage) {
    bool found = false;
    record.for_each_plain([&](const PlainTensorMeta& plain) {
      const ValueId value = value_at(plain.flat_index);
      found |= value != kNoValue && graph[value].storage == storage;
    });
    return found;
  };
  const auto add = [](std::vector<std::size_t>& list, std::size_t item) {
    if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
  };
  for (const ValueId value : partitioned.halves.saved) {
    const StorageId storage = graph[value].storage;
    Saved how;
    bool unwatched = false;
    for (std::size_t i = 0; i < layout->inputs.size(); ++i) {
      if (!uses_storage(
              layout->inputs[i], [&](std::size_t flat) { return graph.inputs[flat].value; }, storage))
        continue;
      // Written by this call itself, after the graph has run.
      if (capture.primal_written[i]) how.how = Saved::How::Copied;
      unwatched |= capture.primal_written[i] || capture.primal_shares_changed[i];
      if (!unwatched) add(watched.inputs, i);
    }
    if (how.how == Saved::How::AsIs && !unwatched)
      for (std::size_t i = 0; i < returned.size(); ++i)
        if (returned[i].how != Returned::How::Copied &&
            uses_storage(
                layout->forward_outputs[returned[i].place],
                [&](std::size_t flat) { return graph.outputs[flat].value(); }, storage))
          add(watched.returned, i);
    saved.push_back(how);
  }
}

std::vector<at::Tensor> SubclassCall::flatten_inputs(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> flat;
  for (std::size_t i = 0; i < inputs.size(); ++i) layout->inputs[i].flatten(inputs[i], flat);
  return flat;
}

std::vector<at::Tensor> SubclassCall::rebuild_returned(const std::vector<c10::IValue>& results,
                                                       const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> flat = tensors_of(results, 0, forward_outputs);
  const at::AutoDispatchBelowADInplaceOrView below;
  // Results in the memory of an input that is about to be written must show the write.
  for (const View& view : views_)
    flat[view.output] = inputs[view.input].as_strided(view.geometry.sizes, view.geometry.strides,
                                                      view.geometry.storage_offset);
  std::vector<at::Tensor> outputs;
  outputs.reserve(returned.size());
  for (const Returned& item : returned) {
    at::Tensor output = layout->forward_outputs[item.place].rebuild(flat);
    // A kernel may have returned its argument: an input must not become a result of the function.
    const bool given_back = std::any_of(inputs.begin(), inputs.end(),
                                        [&](const at::Tensor& input) { return input.is_same(output); });
    if (item.how == Returned::How::Copied)
      output = output.clone();
    else if (item.how == Returned::How::Unshared || given_back)
      output = output.variable_data();
    outputs.push_back(std::move(output));
  }
  return outputs;
}

void SubclassCall::flatten_tangent(std::size_t tangent, const at::Tensor& gradient,
                                   std::vector<at::Tensor>& flat) const {
  const FlattenRecord& record = layout->tangents[tangent];
  const std::string& name = tangents[tangent].name;
  if (!gradient.defined()) {
    record.for_each_plain([&](const PlainTensorMeta& plain) {
      const Geometry& geometry = *plain.geometry;
      flat.push_back(at::empty_strided(geometry.sizes, geometry.strides,
                                       at::dtype(geometry.dtype).device(geometry.device))
                         .zero_());
    });
    return;
  }
  flatten_gradient(record, gradient, name, flat);
}

std::vector<at::Tensor> SubclassCall::rebuild_gradients(const std::vector<c10::IValue>& results) const {
  const std::vector<at::Tensor> flat = tensors_of(results, 0, results.size());
  std::vector<at::Tensor> gradients;
  for (const FlattenRecord& record : layout->input_gradients) gradients.push_back(record.rebuild(flat));
  return gradients;
}

std::vector<at::Tensor> SubclassCall::run(const std::vector<at::Tensor>& inputs, const CallSizes&) {
  const std::vector<at::Tensor> flat = flatten_inputs(inputs);
  const std::vector<c10::IValue> values = halves.forward->run(flat);
  std::vector<at::Tensor> outputs = rebuild_returned(values, flat);
  if (!tangents.empty()) {
    const auto node = make_node<SubclassNode>(c10::intrusive_ptr<SubclassCall>::reclaim_copy(this));
    node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(inputs)));
    for (const Tangent& tangent : tangents)
      torch::autograd::set_history(outputs[tangent.returned], NodePtr(node));
    node->save_all(values, inputs, outputs);
  }
  std::vector<at::Tensor> results(layout->forward_outputs.size());
  for (std::size_t i = 0; i < returned.size(); ++i) results[returned[i].place] = std::move(outputs[i]);
  return results;
}

}  // namespace penstock::graph
