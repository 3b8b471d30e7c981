#include "penstock/graph/wrap/result_view.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace penstock::graph {

at::Tensor result_view(at::Tensor base, const OutputInfo& info, const BoundSizes* sizes) {
  const c10::AutoGradMode mode(info.requires_grad_for_backward);
  if (!info.requires_grad) base = base.detach();
  if (!info.by_geometry) return info.view.apply(std::move(base), sizes);
  const LayoutInCall layout = layout_in_call(info.geometry, sizes);
  return base.as_strided(layout.sizes, layout.strides, layout.storage_offset);
}

void restore_input_aliases(Values& outputs, const Values& inputs, const ViewAndMutationMeta& meta,
                           const BoundSizes* sizes) {
  for (std::size_t i = 0; i < meta.outputs.size(); ++i) {
    const OutputInfo& info = meta.outputs[i];
    if (info.type != OutputType::Tensor) continue;
    if (info.same_as)
      outputs[i] = outputs[*info.same_as];
    else if (info.kind == OutputKind::IsInput)
      outputs[i] = inputs[*info.base_index];
    else if (info.kind == OutputKind::AliasOfInput)
      outputs[i] = result_view(inputs[*info.base_index].toTensor(), info, sizes);
  }
}

}  // namespace penstock::graph
