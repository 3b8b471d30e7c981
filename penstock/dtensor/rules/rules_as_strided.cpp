// as_strided: a view by sizes, strides and offset in the memory of the whole tensor. Autograd describes views
// by it, to propagate writes into them.
//
// The strides tell which dims were selected, sliced and permuted; the same view is then taken of the
// distributed tensor, so a dim that is covered completely may stay split. If that is not possible, the view
// is taken of the whole memory, on every rank.
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

using Numbers = std::vector<std::int64_t>;

struct StridedView {
  Numbers size, stride;
  std::int64_t offset = 0;  // from the start of the base tensor
};

// How one dim of the base tensor is used.
struct Cut {
  std::int64_t first = 0, step = 1, count = 1;
  std::optional<std::size_t> target;  // dim of the view; std::nullopt if selected
};

// The cuts that produce the view, if possible: its dims of more than one element are slices of different
// dims.
std::optional<std::vector<Cut>> read_cuts(const GlobalGeometry& whole, const StridedView& view) {
  const std::size_t ndim = whole.shape.size();
  std::vector<std::size_t> order;  // of dims with more than one element, the outermost first
  for (std::size_t dim = 0; dim < ndim; ++dim) {
    if (whole.shape[dim] == 0) return std::nullopt;
    if (whole.shape[dim] > 1) order.push_back(dim);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return whole.stride[a] > whole.stride[b]; });
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t inner =
        i + 1 < order.size() ? whole.stride[order[i + 1]] * whole.shape[order[i + 1]] : 1;
    if (whole.stride[order[i]] < inner) return std::nullopt;  // elements share memory
  }
  std::vector<Cut> cuts(ndim);
  for (std::size_t target = 0; target < view.size.size(); ++target) {
    if (view.size[target] == 0) return std::nullopt;
    if (view.size[target] == 1) continue;
    const auto found = std::find_if(order.begin(), order.end(), [&](std::size_t dim) {
      return whole.stride[dim] <= view.stride[target];
    });
    if (found == order.end() || view.stride[target] % whole.stride[*found] != 0 || cuts[*found].target)
      return std::nullopt;
    cuts[*found] = {0, view.stride[target] / whole.stride[*found], view.size[target], target};
  }
  std::int64_t rest = view.offset;
  for (const std::size_t dim : order) {
    Cut& cut = cuts[dim];
    cut.first = rest / whole.stride[dim];
    rest -= cut.first * whole.stride[dim];
    if (cut.first + (cut.count - 1) * cut.step >= whole.shape[dim]) return std::nullopt;
  }
  if (rest != 0) return std::nullopt;
  return cuts;
}

// Applies the cuts by operators on the distributed tensor.
at::Tensor apply_cuts(const at::Tensor& self, const std::vector<Cut>& cuts, const StridedView& view) {
  at::Tensor result = self;
  Numbers targets;  // of the remaining dims
  for (std::size_t dim = cuts.size(); dim-- > 0;) {
    const Cut& cut = cuts[dim];
    const auto at = static_cast<std::int64_t>(dim);
    if (!cut.target)
      result = at::select(result, at, cut.first);
    else if (cut.count != self.size(at))
      result = at::slice(result, at, cut.first, cut.first + (cut.count - 1) * cut.step + 1, cut.step);
    if (cut.target) targets.insert(targets.begin(), static_cast<std::int64_t>(*cut.target));
  }
  Numbers order(targets.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return targets[static_cast<std::size_t>(a)] < targets[static_cast<std::size_t>(b)];
  });
  if (!std::is_sorted(order.begin(), order.end())) result = at::permute(result, order);
  for (std::size_t target = 0; target < view.size.size(); ++target)
    if (view.size[target] == 1) result = at::unsqueeze(result, static_cast<std::int64_t>(target));
  return result.is_same(self) ? at::alias(self) : result;
}

// The same elements in the same order, only with other dims.
bool is_reshape(const GlobalGeometry& whole, const StridedView& view) {
  std::int64_t count = 1;
  for (const std::int64_t size : view.size) count *= size;
  return view.offset == 0 && count == whole.numel() && whole.stride == contiguous_stride(whole.shape) &&
         view.stride == contiguous_stride(view.size);
}

bool same_layout(const at::Tensor& local, const GlobalGeometry& whole) {
  for (std::int64_t dim = 0; dim < local.dim(); ++dim)
    if (local.size(dim) > 1 && local.stride(dim) != whole.stride[static_cast<std::size_t>(dim)]) return false;
  return true;
}

// Of the whole memory, which every rank then has.
at::Tensor view_memory(const at::Tensor& self, const StridedView& view) {
  const DTensorPayload& payload = *dtensor_payload(self);
  const GlobalGeometry& whole = payload.spec->geometry();
  const Placements replicated(payload.spec->placements().size());
  const SpecPtr spec = payload.spec->with_placements(replicated);
  bool copied = payload.copied_view || spec != payload.spec;
  at::Tensor local =
      spec == payload.spec
          ? payload.local()
          : transfer_between(payload.spec, spec, PartialTarget::Refuse)->run(payload.mesh, payload.local());
  if (!same_layout(local, whole)) {
    local = at::empty_strided(whole.shape, whole.stride, local.options()).copy_(local);
    copied = true;
  }
  const at::Tensor part = local.as_strided(view.size, view.stride, local.storage_offset() + view.offset);
  const SpecPtr result_spec =
      DTensorSpec::get(*payload.spec, replicated, {view.size, view.stride, whole.dtype, whole.device});
  at::Tensor result =
      make_dtensor(part, result_spec, payload.mesh, &self, self.storage_offset() + view.offset);
  if (copied) dtensor_payload(result)->mark_copied(self);
  return result;
}

void as_strided(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = stack->end() - 4;
  const at::Tensor self = arguments[0].toTensor();
  StridedView view{arguments[1].toIntVector(), arguments[2].toIntVector(), 0};
  if (arguments[3].isInt()) view.offset = arguments[3].toInt() - self.storage_offset();
  stack->erase(arguments, stack->end());
  const GlobalGeometry& whole = dtensor_payload(self)->spec->geometry();
  if (is_reshape(whole, view))
    stack->push_back(view.size == whole.shape ? at::alias(self)
                                              : at::_reshape_alias(self, view.size, view.stride));
  else if (const auto cuts = view.offset < 0 ? std::nullopt : read_cuts(whole, view))
    stack->push_back(apply_cuts(self, *cuts, view));
  else
    stack->push_back(view_memory(self, view));
}

}  // namespace

void add_as_strided_rules(RuleTable& table) { table.handle({"as_strided"}, as_strided); }

}  // namespace penstock::detail
