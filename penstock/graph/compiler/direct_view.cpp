// Views without their operators. A view operator only makes a tensor object: with the geometries at hand that
// is a few stores. It is done so if nothing can tell the difference: no mode is active, and the viewed tensor
// is an ordinary one with the geometry that was planned.
#include <c10/core/TensorImpl.h>

#include <utility>

#include "penstock/graph/compiler/plain_tensor.h"
#include "penstock/graph/compiler/run_plan.h"

namespace penstock::graph {
namespace {

// Takes the place of the memory in tensor objects that are not in use.
const c10::Storage& no_memory() {
  static const c10::Storage& storage =
      *new c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, at::kCPU));
  return storage;
}

bool is_laid_out(const at::Tensor& tensor, const LayoutInCall& layout) {
  return tensor.sizes() == layout.sizes && tensor.strides() == layout.strides &&
         tensor.storage_offset() == layout.storage_offset;
}

at::Tensor view_of(const at::Tensor& base, const LayoutInCall& layout, at::Tensor& idle) {
  if (idle.defined() && idle.key_set() == base.key_set() && idle.dtype() == base.dtype()) {
    c10::TensorImpl* impl = idle.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(base.storage());
    // The layout of the previous run is normally that of this one.
    if (!is_laid_out(idle, layout))
      impl->set_sizes_and_strides(layout.sizes, layout.strides, layout.storage_offset);
    return std::move(idle);
  }
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, layout.storage_offset);
  return view;
}

}  // namespace

void call_view(const Step& step, Frame& frame) {
  const DirectView& plan = frame.plan->views[step.special];
  const at::Tensor& base = frame.slots[plan.base];
  if (!frame.unobserved || !is_plain_with(base, plan.viewed, frame.sizes)) {
    step.otherwise(step, frame);
    return;
  }
  for (const DirectView::Made& made : plan.made) {
    if (made.slot == kNoSlot) continue;
    frame.slots[made.slot] =
        view_of(base, layout_in_call(made.geometry, frame.sizes), frame.idle_views[made.slot]);
    frame.made_directly[made.slot] = 1;
  }
}

void free_slot(Frame& frame, Slot slot) {
  at::Tensor& tensor = frame.slots[slot];
  if (frame.made_directly.empty() || !frame.made_directly[slot]) {
    tensor.reset();
    return;
  }
  frame.made_directly[slot] = 0;
  if (!tensor.defined() || tensor.use_count() != 1 || tensor.weak_use_count() != 1) {
    tensor.reset();
    return;
  }
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(no_memory());
  frame.idle_views[slot] = std::move(tensor);
}

}  // namespace penstock::graph
