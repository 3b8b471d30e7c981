// Losses and their backward operators.
#include <algorithm>
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using at::Scalar;
using Two = std::tuple<Tensor, Tensor>;

Tensor huber_loss(const Tensor& self, const Tensor& target, std::int64_t reduction, double) {
  const Tensor loss = iterate({self, target}, at::result_type(self, target));
  return reduction == kNoReduction ? loss : scalar_like(loss);
}

Tensor mse_loss_backward(const Tensor&, const Tensor& self, const Tensor&, std::int64_t) {
  return contiguous_like(self);
}
Tensor smooth_l1_loss_backward(const Tensor&, const Tensor& self, const Tensor&, std::int64_t, double) {
  return contiguous_like(self);
}

Tensor binary_cross_entropy(const Tensor& self, const Tensor& target, const OptionalTensor&,
                            std::int64_t reduction) {
  TORCH_CHECK(self.sizes() == target.sizes(), "Using a target size (", target.sizes(),
              ") that is different to the input size (", self.sizes(), ")");
  return reduction == kNoReduction ? at::empty_like(self) : scalar_like(self);
}
Tensor binary_cross_entropy_backward(const Tensor&, const Tensor& self, const Tensor&, const OptionalTensor&,
                                     std::int64_t) {
  return at::empty_like(self);
}

Two nll_loss2d_forward(const Tensor& self, const Tensor& target, const OptionalTensor&,
                       std::int64_t reduction, std::int64_t) {
  TORCH_CHECK(self.dim() == 4 && target.dim() == 3 && self.size(0) == target.size(0) &&
                  self.size(2) == target.size(1) && self.size(3) == target.size(2),
              "size mismatch (got input: ", self.sizes(), " , target: ", target.sizes(), ")");
  return {reduction == kNoReduction ? at::empty({self.size(0), self.size(2), self.size(3)}, self.options())
                                    : scalar_like(self),
          scalar_like(self)};
}
Tensor nll_loss2d_backward(const Tensor&, const Tensor& self, const Tensor&, const OptionalTensor&,
                           std::int64_t, std::int64_t, const Tensor&) {
  return at::empty_like(self);
}

Tensor multi_margin_loss(const Tensor& self, const Tensor& target, const Scalar&, const Scalar&,
                         const OptionalTensor&, std::int64_t reduction) {
  return reduction == kNoReduction && target.dim() > 0
             ? at::empty({self.dim() > 1 ? self.size(0) : 1}, self.options())
             : scalar_like(self);
}
Tensor multi_margin_loss_backward(const Tensor&, const Tensor& self, const Tensor&, const Scalar&,
                                  const Scalar&, const OptionalTensor&, std::int64_t) {
  return contiguous_like(self);
}

Two multilabel_margin_loss_forward(const Tensor& self, const Tensor& target, std::int64_t reduction) {
  const bool whole = reduction == kNoReduction && target.dim() > 1;
  return {whole ? at::empty({self.size(0)}, self.options()) : scalar_like(self),
          at::empty(target.sizes(), self.options())};
}
Tensor multilabel_margin_loss_backward(const Tensor&, const Tensor& self, const Tensor&, std::int64_t,
                                       const Tensor&) {
  return contiguous_like(self);
}

Two ctc_loss(const Tensor& log_probs, const Tensor&, IntArrayRef, IntArrayRef target_lengths, std::int64_t,
             bool) {
  // log_probs: (time, batch, labels)
  const std::int64_t longest =
      target_lengths.empty() ? 0 : *std::max_element(target_lengths.begin(), target_lengths.end());
  return {at::empty({log_probs.size(1)}, log_probs.options()),
          at::empty({log_probs.size(1), log_probs.size(0), 2 * longest + 1}, log_probs.options())};
}
Tensor ctc_loss_backward(const Tensor&, const Tensor& log_probs, const Tensor&, IntArrayRef, IntArrayRef,
                         const Tensor&, const Tensor&, std::int64_t, bool) {
  return contiguous_like(log_probs);
}

}  // namespace

void add_loss_shapes() {
  register_where_missing("aten::huber_loss", huber_loss);
  // Composite over an out= overload without a kernel for the meta device.
  register_shape_function("aten::huber_loss_backward", smooth_l1_loss_backward);
  register_shape_function("aten::smooth_l1_loss_backward", smooth_l1_loss_backward);
  register_where_missing("aten::mse_loss_backward", mse_loss_backward);
  register_where_missing("aten::binary_cross_entropy", binary_cross_entropy);
  register_where_missing("aten::binary_cross_entropy_backward", binary_cross_entropy_backward);
  register_where_missing("aten::nll_loss2d_forward", nll_loss2d_forward);
  register_where_missing("aten::nll_loss2d_backward", nll_loss2d_backward);
  register_where_missing("aten::multi_margin_loss", multi_margin_loss);
  register_where_missing("aten::multi_margin_loss_backward", multi_margin_loss_backward);
  register_where_missing("aten::multilabel_margin_loss_forward", multilabel_margin_loss_forward);
  register_where_missing("aten::multilabel_margin_loss_backward", multilabel_margin_loss_backward);
  // Newer LibTorch versions tag it as data dependent, because of another overload that takes the lengths as
  // tensors.
  register_shape_function("aten::_ctc_loss", ctc_loss);
  register_where_missing("aten::_ctc_loss_backward", ctc_loss_backward);
}

}  // namespace penstock::detail
