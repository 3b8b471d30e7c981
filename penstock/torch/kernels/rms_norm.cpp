#include "penstock/torch/kernels/rms_norm.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/rms_norm_kernels.h"

namespace penstock {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// ---- operators: x [rows, width] and a float32 weight, contiguous; shapes only on the meta device ----

TwoTensors rms_norm_rows(const at::Tensor& x, const at::Tensor& weight, double epsilon,
                         at::ScalarType dtype) {
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(dtype)),
             scales = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  if (!x.is_meta()) detail::launch_rms_norm(x, weight, epsilon, y, scales);
  return {y, scales};
}

TwoTensors rms_norm_rows_backward(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
                                  const at::Tensor& scales) {
  at::Tensor x_gradient = at::empty(x.sizes(), x.options());
  if (x.is_meta()) return {x_gradient, at::empty(weight.sizes(), weight.options())};
  const at::Tensor weight_gradient =
      detail::launch_rms_norm_backward(gradient, x, weight, scales, x_gradient);
  return {x_gradient, weight_gradient};
}

template <class Signature>
auto norm_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given, const at::Tensor& given_weight,
                            double epsilon, at::ScalarType dtype) {
    static const auto op = norm_operator<decltype(rms_norm_rows)>("penstock::rms_norm");
    const at::Tensor x = given.reshape({-1, given.size(-1)}).contiguous(),
                     weight = given_weight.to(at::kFloat).contiguous();
    const auto [y, scales] = op.call(x, weight, epsilon, dtype);
    context->save_for_backward({x, weight, scales});
    context->saved_data["sizes"] = given.sizes().vec();
    context->saved_data["dtype"] = given_weight.scalar_type();
    return y.view(given.sizes());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = norm_operator<decltype(rms_norm_rows_backward)>("penstock::rms_norm_backward");
    const variable_list saved = context->get_saved_variables();
    const auto [x, weight] =
        op.call(gradients[0].reshape(saved[0].sizes()).contiguous(), saved[0], saved[1], saved[2]);
    return {x.view(context->saved_data["sizes"].toIntVector()),
            weight.to(context->saved_data["dtype"].toScalarType()), at::Tensor(), at::Tensor()};
  }
};

at::Tensor norm_scale(const at::Tensor& x, double epsilon) {
  return at::rsqrt(at::mean(at::mul(x, x), -1, true).add(epsilon));
}

// By LibTorch's operators. Keeps x alone, where they would keep the scaled rows as well; backward computes
// the scales again, of x, so that it can be differentiated.
struct LeanRmsNorm : torch::autograd::Function<LeanRmsNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            double epsilon) {
    context->save_for_backward({x, weight});
    context->saved_data["epsilon"] = epsilon;
    return at::mul(at::mul(x, norm_scale(x, epsilon)), weight);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &gradient = gradients[0];
    const at::Tensor scale = norm_scale(x, context->saved_data["epsilon"].toDouble()),
                     rows = at::mul(x, scale), by_rows = at::mul(gradient, weight);
    const at::Tensor along = at::mean(at::mul(by_rows, rows), -1, true);
    return {at::mul(at::sub(by_rows, at::mul(rows, along)), scale),
            at::sum_to(at::mul(gradient, rows), weight.sizes()), at::Tensor()};
  }
};

bool is_plain_or_fake(const at::Tensor& tensor) { return !is_wrapper(tensor) || is_fake(tensor); }

bool has_norm_kernel(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cuda() && x.numel() > 0 && weight.dim() == 1 && weight.size(0) == x.size(-1) &&
         weight.device() == x.device() && is_plain_or_fake(x) && is_plain_or_fake(weight) &&
         detail::has_norm_kernels(x, weight);
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  if (has_norm_kernel(x, weight)) return RmsNormFunction::apply(x, weight, epsilon, dtype_in_scope(x));
  const auto dtype = x.scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16)
    return rms_norm(x.to(at::kFloat), weight.to(at::kFloat), epsilon).to(dtype);
  return LeanRmsNorm::apply(x, weight, epsilon);
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float epsilon, ScalarType dtype) -> (Tensor, Tensor)");
  library.def(
      "rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor scales) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(penstock, CUDA, library) {
  library.impl("rms_norm", &rms_norm_rows);
  library.impl("rms_norm_backward", &rms_norm_rows_backward);
}
TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  library.impl("rms_norm", &rms_norm_rows);
  library.impl("rms_norm_backward", &rms_norm_rows_backward);
}

}  // namespace penstock
