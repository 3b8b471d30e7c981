#include "penstock/torch/fused_math.h"

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>
#include <torch/csrc/autograd/custom_function.h>

#include "penstock/torch/fused_math_kernels.h"
#include "penstock/torch/mode.h"
#include "penstock/torch/wrapper.h"

namespace penstock {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool fits(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.numel() > 0 && !is_wrapper(tensor) && current_mode() == nullptr && detail::has_fused_math(tensor);
}

struct CrossEntropySum : torch::autograd::Function<CrossEntropySum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored) {
    const at::Tensor rows = logits.contiguous(), wanted = targets.contiguous();
    const at::Tensor losses = at::empty({rows.size(0)}, rows.options().dtype(at::kFloat)), log_sums = at::empty_like(losses);
    detail::launch_cross_entropy(rows, wanted, ignored, losses, log_sums);
    context->save_for_backward({rows, wanted, log_sums});
    context->saved_data["ignored"] = ignored;
    return losses.sum();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor result = at::empty_like(saved[0]);
    detail::launch_cross_entropy_backward(saved[0], saved[1], context->saved_data["ignored"].toInt(), saved[2], gradients[0].to(at::kFloat).contiguous(), result);
    return {result, at::Tensor(), at::Tensor()};
  }
};

struct RotatePairs : torch::autograd::Function<RotatePairs> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& turns) {
    const at::Tensor points = x.contiguous(), numbers = at::view_as_real(turns).contiguous();
    at::Tensor result = at::empty_like(points);
    detail::launch_rotate_pairs(points, numbers, false, result);
    context->save_for_backward({numbers});
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor gradient = gradients[0].contiguous();
    const at::Tensor result = at::empty_like(gradient);
    detail::launch_rotate_pairs(gradient, context->get_saved_variables()[0], true, result);
    return {result, at::Tensor()};
  }
};

struct SiluProduct : torch::autograd::Function<SiluProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    const at::Tensor a = gate.contiguous(), b = up.contiguous();
    at::Tensor result = at::empty_like(a);
    detail::launch_silu_product(a, b, result);
    context->save_for_backward({a, b});
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor gate = at::empty_like(saved[0]), up = at::empty_like(saved[1]);
    detail::launch_silu_product_backward(saved[0], saved[1], gradients[0].contiguous(), gate, up);
    return {gate, up};
  }
};

}  // namespace

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored) {
  if (fits(logits) && logits.dim() == 2 && targets.dim() == 1 && targets.scalar_type() == at::kLong && targets.device() == logits.device())
    return CrossEntropySum::apply(logits, targets, ignored);
  const auto dtype = logits.scalar_type();
  const at::Tensor wide = dtype == at::kHalf || dtype == at::kBFloat16 ? logits.to(at::kFloat) : logits;
  return at::cross_entropy_loss(wide, targets, {}, at::Reduction::Sum, ignored);
}

at::Tensor rotate_pairs(const at::Tensor& x, const at::Tensor& turns) {
  if (fits(x) && x.dim() == 4 && turns.scalar_type() == at::kComplexFloat && turns.device() == x.device()) return RotatePairs::apply(x, turns);
  const at::ScalarType dtype = turns.scalar_type() == at::kComplexDouble ? at::kDouble : at::kFloat;
  const at::Tensor wide = x.to(dtype);
  // A part that begins in the middle of a pair of its memory cannot be viewed as points.
  const at::Tensor points = at::view_as_complex((wide.storage_offset() % 2 == 0 ? wide : wide.clone()).view({x.size(0), x.size(1), x.size(2), x.size(3) / 2, 2}));
  return at::view_as_real(points * turns).view(x.sizes()).to(x.scalar_type());
}

at::Tensor silu_product(const at::Tensor& gate, const at::Tensor& up) {
  if (fits(gate) && fits(up) && gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type() && gate.device() == up.device()) return SiluProduct::apply(gate, up);
  return at::silu(gate) * up;
}

}  // namespace penstock
