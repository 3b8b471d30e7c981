#include "penstock/graph/wrap/subclasses.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock::graph {
namespace {

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

void flatten_tangent(const FlattenRecord& record, const at::Tensor& gradient, const std::string& name,
                     std::vector<at::Tensor>& flat) {
  if (gradient.defined()) return flatten_gradient(record, gradient, name, flat);
  record.for_each_plain([&](const PlainTensorMeta& plain) {
    const Geometry& geometry = *plain.geometry;
    flat.push_back(
        at::empty_strided(geometry.sizes, geometry.strides, at::dtype(geometry.dtype).device(geometry.device))
            .zero_());
  });
}

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

// A result that the caller does not expect to be one of its arguments: a kernel may return its argument.
bool is_one_of(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& other) { return other.is_same(tensor); });
}

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
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

class ForwardOverSubclasses final : public CompiledGraph {
 public:
  ForwardOverSubclasses(std::shared_ptr<const Subclasses> how, std::shared_ptr<const CompiledGraph> inner)
      : how_(std::move(how)), inner_(std::move(inner)) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    const SubclassLayout& layout = *how_->layout_;
    PENSTOCK_INVARIANT(inputs.size() == layout.inputs.size(), "a call has other inputs than its layout");
    std::vector<at::Tensor> flat_inputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) layout.inputs[i].flatten(inputs[i], flat_inputs);
    std::vector<c10::IValue> values = inner_->run(flat_inputs, sizes);
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<at::Tensor> flat;
    flat.reserve(how_->flat_forward_outputs_);
    for (std::size_t i = 0; i < how_->flat_forward_outputs_; ++i) flat.push_back(tensor_or_none(values[i]));
    // Results in the memory of an input that is about to be written must show the write.
    for (const Subclasses::View& view : how_->views_)
      flat[view.output] = flat_inputs[view.input].as_strided(view.geometry.sizes, view.geometry.strides,
                                                             view.geometry.storage_offset);
    std::vector<c10::IValue> results;
    results.reserve(layout.forward_outputs.size() + values.size() - flat.size());
    for (const FlattenRecord& record : layout.forward_outputs) {
      if (!record.is_subclass() && !flat[record.first_flat()].defined()) {
        results.push_back(std::move(values[record.first_flat()]));  // a number, or nothing
        continue;
      }
      at::Tensor result = record.rebuild(flat);
      if (!record.is_subclass() && is_one_of(result, flat_inputs)) result = result.variable_data();
      results.emplace_back(std::move(result));
    }
    std::move(values.begin() + static_cast<std::ptrdiff_t>(flat.size()), values.end(),
              std::back_inserter(results));
    return results;
  }

 private:
  std::shared_ptr<const Subclasses> how_;
  std::shared_ptr<const CompiledGraph> inner_;
};

class BackwardOverSubclasses final : public CompiledGraph {
 public:
  BackwardOverSubclasses(std::shared_ptr<const Subclasses> how, std::shared_ptr<const CompiledGraph> inner)
      : how_(std::move(how)), inner_(std::move(inner)) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    std::vector<at::Tensor> flat_gradients;
    for (const c10::IValue& value : inner_->run(std::move(inputs), sizes))
      flat_gradients.push_back(tensor_or_none(value));
    std::vector<c10::IValue> gradients;
    std::size_t end = 0;
    for (const FlattenRecord& record : how_->layout_->input_gradients) {
      const auto first = flat_gradients.begin() + static_cast<std::ptrdiff_t>(end);
      end += record.count();
      // None of a subclass: the other graph of a backward that is split computes it.
      const bool is_there = !record.is_subclass() || record.count() == 0 ||
                            std::any_of(first, first + static_cast<std::ptrdiff_t>(record.count()),
                                        [](const at::Tensor& part) { return part.defined(); });
      gradients.emplace_back(is_there ? record.rebuild(flat_gradients) : at::Tensor());
    }
    // What is kept for that graph.
    gradients.insert(gradients.end(), flat_gradients.begin() + static_cast<std::ptrdiff_t>(end),
                     flat_gradients.end());
    return gradients;
  }

 private:
  std::shared_ptr<const Subclasses> how_;
  std::shared_ptr<const CompiledGraph> inner_;
};

Subclasses::Subclasses(const JointGraph& joint, const ViewAndMutationMeta& meta, const Convention& convention)
    : layout_(joint.subclasses), flat_forward_outputs_(joint.forward_outputs) {
  const Graph& graph = joint.graph;
  for (const FlattenRecord& record : layout_->forward_outputs)
    record.for_each_plain([&](const PlainTensorMeta& plain) {
      const auto& input = layout_->in_mutated_input[plain.flat_index];
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
  for (const FlattenRecord& record : layout_->tangents)
    tangent_names_.push_back(name_of(joint.tangents[record.first_flat()], convention));
  PENSTOCK_INVARIANT(layout_->forward_outputs.size() == meta.forward_returns(),
                     "a layout has another number of results than the function");
}

std::string Subclasses::decision() const {
  const auto count = [](const std::vector<FlattenRecord>& records) {
    return std::count_if(records.begin(), records.end(),
                         [](const FlattenRecord& record) { return record.is_subclass(); });
  };
  return fmt::format("{} of {} inputs, {} of {} results, {} of {} gradients", count(layout_->inputs),
                     layout_->inputs.size(), count(layout_->forward_outputs), layout_->forward_outputs.size(),
                     count(layout_->input_gradients), layout_->input_gradients.size());
}

std::vector<at::Tensor> Subclasses::tangents(std::vector<at::Tensor> gradients) const {
  PENSTOCK_INVARIANT(gradients.size() == layout_->tangents.size(),
                     "a backward has other tangents than results");
  std::vector<at::Tensor> flat;
  for (std::size_t i = 0; i < gradients.size(); ++i)
    flatten_tangent(layout_->tangents[i], gradients[i], tangent_names_[i], flat);
  return flat;
}

std::shared_ptr<const CompiledGraph> Subclasses::around(std::shared_ptr<const CompiledGraph> inner,
                                                        GraphRole role) const {
  if (role == GraphRole::Backward)
    return std::make_shared<const BackwardOverSubclasses>(shared_from_this(), std::move(inner));
  return std::make_shared<const ForwardOverSubclasses>(shared_from_this(), std::move(inner));
}

}  // namespace penstock::graph
