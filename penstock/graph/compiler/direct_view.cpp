// Views without their operators. What a view operator returns depends on the layout of the viewed tensor and
// on its constants alone, and is only a tensor object: a few stores, if the layout is known. So a frame
// remembers what each view operator did the last time, and does it again by itself if nothing can tell the
// difference: no mode is active, and the viewed tensor is a plain one with the same layout as then.
#include <c10/core/TensorImpl.h>

#include <algorithm>
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

StridedLayout layout_of(const at::Tensor& tensor) {
  StridedLayout layout;
  layout.sizes.append(tensor.sizes().begin(), tensor.sizes().end());
  layout.strides.append(tensor.strides().begin(), tensor.strides().end());
  layout.storage_offset = tensor.storage_offset();
  return layout;
}

at::Tensor view_of(const at::Tensor& base, const StridedLayout& layout, at::Tensor& idle) {
  if (idle.defined() && idle.key_set() == base.key_set() && idle.dtype() == base.dtype()) {
    c10::TensorImpl* impl = idle.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(base.storage());
    if (!is_laid_out_as(idle, layout))
      impl->set_sizes_and_strides(layout.sizes, layout.strides, layout.storage_offset);
    return std::move(idle);
  }
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, layout.storage_offset);
  return view;
}

// Calls the operator, and remembers what it did if that was nothing but making plain views.
void call_and_remember(const Step& step, const DirectView& plan, Frame& frame) {
  const at::Tensor base = frame.slots[plan.base];  // a boxed call takes it from its slot
  ViewsMade& views = frame.views[step.special];
  views.known = false;
  step.otherwise(step, frame);
  if (!frame.unobserved || !base.defined() || !is_plain(base)) return;
  views.made.clear();
  for (const Slot slot : plan.made) {
    if (slot != kNoSlot) {
      const at::Tensor& view = frame.slots[slot];
      if (!view.defined() || view.key_set() != base.key_set() || view.dtype() != base.dtype() ||
          !view.is_alias_of(base))
        return;
    }
    views.made.push_back(slot == kNoSlot ? StridedLayout() : layout_of(frame.slots[slot]));
  }
  views.viewed = layout_of(base);
  views.dtype = base.scalar_type();
  views.known = true;
}

}  // namespace

void call_view(const Step& step, Frame& frame) {
  const DirectView& plan = frame.plan->views[step.special];
  const ViewsMade& views = frame.views[step.special];
  const at::Tensor& base = frame.slots[plan.base];
  if (!views.known || !frame.unobserved || !base.defined() || !is_plain(base) ||
      base.scalar_type() != views.dtype || !is_laid_out_as(base, views.viewed)) {
    call_and_remember(step, plan, frame);
    return;
  }
  for (std::size_t i = 0; i < plan.made.size(); ++i) {
    const Slot slot = plan.made[i];
    if (slot == kNoSlot) continue;
    frame.slots[slot] = view_of(base, views.made[i], frame.idle_views[slot]);
    frame.made_directly[slot] = 1;
  }
}

void free_slot(Frame& frame, Slot slot) {
  at::Tensor& tensor = frame.slots[slot];
  const bool direct = !frame.made_directly.empty() && std::exchange(frame.made_directly[slot], 0);
  if (!direct || !tensor.defined() || tensor.use_count() != 1 || tensor.weak_use_count() != 1) {
    tensor.reset();
    return;
  }
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(no_memory());
  frame.idle_views[slot] = std::move(tensor);
}

void forget_views(Frame& frame) {
  for (ViewsMade& views : frame.views) views.known = false;
}

}  // namespace penstock::graph
