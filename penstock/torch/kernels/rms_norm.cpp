#include "penstock/torch/kernels/rms_norm.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/dispatch/once_differentiable.h"
#include "penstock/torch/kernels/rms_norm_kernels.h"

namespace penstock {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = c10::optional<at::Tensor>;
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
    note_history(context, {given, given_weight});
    context->set_materialize_grads(false);
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
    if (!gradients[0].defined()) return variable_list(4);
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::rms_norm", gradients, [&] {
      const auto [x, weight] =
          op.call(gradients[0].reshape(saved[0].sizes()).contiguous(), saved[0], saved[1], saved[2]);
      return variable_list{x.view(context->saved_data["sizes"].toIntVector()),
                           weight.to(context->saved_data["dtype"].toScalarType()), at::Tensor(),
                           at::Tensor()};
    });
  }
};

at::Tensor norm_scale(const at::Tensor& x, double epsilon) {
  return at::rsqrt(at::mean(at::mul(x, x), -1, true).add(epsilon));
}

// By LibTorch's operators. Keeps x alone, where they would keep the scaled rows as well; backward computes
// the scales again, of x, so that it can be differentiated.
struct LeanRmsNorm : torch::autograd::Function<LeanRmsNorm> {
  // An absent weight is an empty optional: LibTorch 1.13 looks for the device of every tensor.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const MaybeTensor& weight,
                            double epsilon) {
    context->set_materialize_grads(false);
    context->save_for_backward({x, weight.has_value() ? *weight : at::Tensor()});
    context->saved_data["epsilon"] = epsilon;
    const at::Tensor rows = at::mul(x, norm_scale(x, epsilon));
    return weight.has_value() ? at::mul(rows, *weight) : rows;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return variable_list(3);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor scale = norm_scale(x, context->saved_data["epsilon"].toDouble()),
                     rows = at::mul(x, scale),
                     by_rows = weight.defined() ? at::mul(gradient, weight) : gradient;
    const at::Tensor along = at::mean(at::mul(by_rows, rows), -1, true);
    return {at::mul(at::sub(by_rows, at::mul(rows, along)), scale),
            weight.defined() ? at::sum_to(at::mul(gradient, rows), weight.sizes()) : at::Tensor(),
            at::Tensor()};
  }
};

bool is_plain_or_fake(const at::Tensor& tensor) { return !is_wrapper(tensor) || is_fake(tensor); }

bool has_norm_kernel(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cuda() && x.numel() > 0 && x.dim() > 0 && weight.defined() && weight.dim() == 1 &&
         weight.size(0) == x.size(-1) && weight.device() == x.device() && is_plain_or_fake(x) &&
         is_plain_or_fake(weight) && detail::has_norm_kernels(x, weight);
}

std::string norm_text(const at::Tensor& tensor) {
  return fmt::format("[{}] of {}", fmt::join(tensor.sizes(), ", "), c10::toString(tensor.scalar_type()));
}

void check_norm(const at::Tensor& x, const at::Tensor& weight) {
  if (!x.defined() || !x.is_floating_point())
    throw ValueError(
        describe("rms_norm: x", x.defined() ? norm_text(x) : "undefined", "a floating-point tensor"));
  if (!weight.defined()) return;
  bool fits = weight.is_floating_point();
  const std::size_t common = static_cast<std::size_t>(std::min(x.dim(), weight.dim()));
  for (std::size_t i = 1; fits && i <= common; ++i) {
    const std::int64_t own = weight.sizes()[weight.sizes().size() - i],
                       of_x = x.sizes()[x.sizes().size() - i];
    fits = own == of_x || own == 1 || of_x == 1;
  }
  if (!fits)
    throw ValueError(
        describe("rms_norm: weight", norm_text(weight),
                 fmt::format("a floating-point tensor that can be multiplied with x, {}", norm_text(x)),
                 "pass one number for each element of a row, or an undefined tensor for none"));
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  check_norm(x, weight);
  if (has_norm_kernel(x, weight)) return RmsNormFunction::apply(x, weight, epsilon, dtype_in_scope(x));
  const auto dtype = x.scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16)
    return rms_norm(x.to(at::kFloat), weight.defined() ? weight.to(at::kFloat) : weight, epsilon).to(dtype);
  if (!weight.defined()) return LeanRmsNorm::apply(x, MaybeTensor(), epsilon);
  // The dtype of a wider weight would become that of the result; so would any beside an x without dims.
  const bool wider =
      x.dim() == 0 ? weight.scalar_type() != dtype : c10::promoteTypes(dtype, weight.scalar_type()) != dtype;
  return LeanRmsNorm::apply(x, MaybeTensor(wider ? weight.to(dtype) : weight), epsilon);
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
