#include "penstock/graph/run/epilogue.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "penstock/graph/wrap/result_view.h"

namespace penstock::graph {

Epilogue::Epilogue(const FunctionCapture& capture)
    : mutated_(capture.meta.mutated_at_run_time()),
      geometry_after_(capture.geometry_after),
      memory_after_(capture.memory_after),
      constants_(capture.meta.outputs.size()) {
  const JointGraph& joint = capture.joint;
  for (std::size_t i = 0; i < constants_.size(); ++i)
    if (capture.meta.outputs[i].type != OutputType::Tensor)
      constants_[i] = joint.graph.outputs[joint.first_output(mutated_.size() + i)];
}

std::string Epilogue::decision() const {
  return mutated_.empty() ? std::string("writes no input")
                          : fmt::format("writes inputs {}", fmt::join(mutated_, ", "));
}

bool Epilogue::same_but_for_sizes(const AppliedWrapper& other) const {
  const auto* theirs = dynamic_cast<const Epilogue*>(&other);
  return theirs && mutated_ == theirs->mutated_ && memory_after_ == theirs->memory_after_ &&
         constants_.size() == theirs->constants_.size();
}

Call Epilogue::around(Call inner, const ViewAndMutationMeta& meta) const {
  return [self = shared_from_this(), inner = std::move(inner), meta](const Values& inputs,
                                                                     const CallSizes& sizes) {
    const Values returned = inner(inputs, sizes);
    self->write_inputs(inputs, returned, meta, sizes.get());
    Values outputs = self->make_outputs(inputs, returned, meta, sizes.get());
    if (meta.grad_mode_after) c10::GradMode::set_enabled(*meta.grad_mode_after);
    return outputs;
  };
}

void Epilogue::write_inputs(const Values& inputs, const Values& returned, const ViewAndMutationMeta& meta,
                            const BoundSizes* sizes) const {
  // Before one of them is given other memory itself.
  std::vector<c10::Storage> memories;
  if (std::any_of(memory_after_.begin(), memory_after_.end(),
                  [](const auto& input) { return input.has_value(); }))
    for (const auto& input : memory_after_)
      memories.push_back(input ? inputs[*input].toTensor().storage() : c10::Storage());
  for (std::size_t i = 0; i < mutated_.size(); ++i) {
    const InputInfo& info = meta.inputs[mutated_[i]];
    const at::Tensor& input = inputs[mutated_[i]].toTensor();
    const at::Tensor& after = returned[i].toTensor();
    // Mutations that were hidden from autograd in the function are hidden here as well. Autograd always sees
    // a change of the shape, except on a leaf, where it would reject it: then it was made under no_grad.
    const bool leaf_with_grad = info.is_leaf && input.requires_grad();
    const bool unseen = info.mutations_under_no_grad || leaf_with_grad;
    const LayoutInCall layout = layout_in_call(geometry_after_[i], sizes);
    // The data first: autograd could not track a write to a view whose shape was changed.
    if (info.mutates_data) {
      const auto place = [&](const at::Tensor& memory) {
        return info.mutates_metadata ? memory.as_strided(layout.sizes, layout.strides, layout.storage_offset)
                                     : memory;
      };
      const c10::AutoGradMode mode(!unseen && c10::GradMode::is_enabled());
      place(unseen && !info.mutations_under_no_grad ? input.detach() : input).copy_(after);
    }
    if (info.mutates_storage_metadata) {
      const at::NoGradGuard no_grad;
      if (memory_after_[i]) {
        input.set_(memories[i], layout.storage_offset, layout.sizes, layout.strides);
      } else {
        at::Tensor memory = after;
        if (memory.strides() != layout.strides)
          memory = at::empty_strided(layout.sizes, layout.strides, after.options()).copy_(after);
        input.set_(memory);
      }
    } else if (info.mutates_metadata) {
      const c10::AutoGradMode mode(!leaf_with_grad && c10::GradMode::is_enabled());
      input.as_strided_(layout.sizes, layout.strides, layout.storage_offset);
    }
  }
}

Values Epilogue::make_outputs(const Values& inputs, const Values& returned, const ViewAndMutationMeta& meta,
                              const BoundSizes* sizes) const {
  const std::size_t first = mutated_.size(), bases = first + meta.outputs.size();
  Values outputs(meta.outputs.size());
  const auto fresh = [&](std::size_t i) {
    const at::Tensor& result = returned[first + i].toTensor();
    if (meta.outputs[i].requires_grad && !meta.outputs[i].requires_grad_for_backward)
      result.set_requires_grad(true);
    return result;
  };
  for (std::size_t i = 0; i < meta.outputs.size(); ++i) {
    const OutputInfo& info = meta.outputs[i];
    if (info.type != OutputType::Tensor)
      outputs[i] = constants_[i].symbolic == kNotSymbolic
                       ? constants_[i].constant
                       : sizes->constants[static_cast<std::size_t>(constants_[i].symbolic)];
    else if (!info.same_as && is_fresh(info.kind))
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
          outputs[i] = inputs[*info.base_index];
          break;
        case OutputKind::AliasOfInput:
          outputs[i] = result_view(inputs[*info.base_index].toTensor(), info, sizes);
          break;
        case OutputKind::AliasOfIntermediate:
        case OutputKind::AliasOfIntermediateSaveAsOutput:
          outputs[i] = result_view(returned[bases + *info.base_index].toTensor(), info, sizes);
          break;
        case OutputKind::AliasOfIntermediateBaseIsUserOutput: {
          const std::size_t base = meta.outputs[*info.base_index].same_as.value_or(*info.base_index);
          outputs[i] = result_view(outputs[base].toTensor(), info, sizes);
          break;
        }
      }
    }
  for (std::size_t i = 0; i < meta.outputs.size(); ++i)
    if (meta.outputs[i].same_as) outputs[i] = outputs[*meta.outputs[i].same_as];
  return outputs;
}

}  // namespace penstock::graph
