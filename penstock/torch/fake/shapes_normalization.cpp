// Normalizations and their backward operators.
#include <array>
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using Mask = std::array<bool, 3>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

bool reduced_precision(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// The dtype of means and deviations. GPU kernels always accumulate half precision in float, CPU kernels only
// with float parameters.
at::TensorOptions statistics(const Tensor& input, std::initializer_list<OptionalTensor> parameters) {
  const bool in_float = shape_device().is_cuda() ? reduced_precision(input) : mixed_types(input, parameters);
  return in_float ? input.options().dtype(at::kFloat) : input.options();
}

// ---- layer ----

Three native_layer_norm(const Tensor& input, IntArrayRef normalized_shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double) {
  const std::int64_t kept = input.dim() - static_cast<std::int64_t>(normalized_shape.size());
  TORCH_CHECK(kept >= 0 && !normalized_shape.empty() &&
                  input.sizes().slice(static_cast<std::size_t>(kept)) == normalized_shape,
              "Given normalized_shape=", normalized_shape,
              ", expected input with shape [*, ...] but got input of size ", input.sizes());
  Sizes sizes(input.sizes().begin(), input.sizes().end());
  for (std::size_t i = static_cast<std::size_t>(kept); i < sizes.size(); ++i) sizes[i] = 1;
  const auto options = statistics(input, {weight, bias});
  return {contiguous_like(input), at::empty(sizes, options), at::empty(sizes, options)};
}

Three native_layer_norm_backward(const Tensor&, const Tensor& input, IntArrayRef, const Tensor&,
                                 const Tensor&, const OptionalTensor& weight, const OptionalTensor& bias,
                                 Mask mask) {
  return {mask[0] ? contiguous_like(input) : Tensor(),
          mask[1] && given(weight) ? contiguous_like(*weight) : Tensor(),
          mask[2] && given(bias) ? contiguous_like(*bias) : Tensor()};
}

// ---- root mean square ----

// Only GPUs have a kernel; elsewhere it is composite.
Two fused_rms_norm(const Tensor& input, IntArrayRef normalized_shape, const OptionalTensor& weight,
                   c10::optional<double>) {
  Three layer = detail::native_layer_norm(input, normalized_shape, weight, {}, 0);
  return {std::get<0>(layer), std::get<2>(layer)};
}

Two fused_rms_norm_backward(const Tensor&, const Tensor& input, IntArrayRef, const Tensor&,
                            const OptionalTensor& weight, std::array<bool, 2> mask) {
  return {mask[0] ? contiguous_like(input) : Tensor(),
          mask[1] && given(weight) ? contiguous_like(*weight) : Tensor()};
}

// ---- batch ----

Three batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                 const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training) {
  const auto options = statistics(input, {weight, bias, running_mean, running_var});
  const Sizes sizes = {training ? input.size(1) : 0};
  return {suggested_like(input), at::empty(sizes, training ? options : input.options()),
          at::empty(sizes, training ? options : input.options())};
}

Three native_batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                        double, double) {
  return batch_norm(input, weight, bias, running_mean, running_var, training);
}

// As above, but the schema declares the running statistics as written.
Three native_batch_norm_legit(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                              Tensor& running_mean, Tensor& running_var, bool training, double, double) {
  return batch_norm(input, weight, bias, running_mean, running_var, training);
}

Three native_batch_norm_legit_no_stats(const Tensor& input, const OptionalTensor& weight,
                                       const OptionalTensor& bias, bool training, double, double) {
  return batch_norm(input, weight, bias, {}, {}, training);
}

Four batch_norm_with_update(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                            Tensor& running_mean, Tensor& running_var, double, double) {
  const auto [output, mean, deviation] = batch_norm(input, weight, bias, running_mean, running_var, true);
  return {output, mean, deviation, at::empty({0}, input.options().dtype(at::kByte))};
}

Three batch_norm_backward(const Tensor& input, const OptionalTensor& weight,
                          std::initializer_list<OptionalTensor> parameters, const Mask& mask) {
  const auto options = mixed_types(input, parameters) ||
                               (given(weight) && shape_device().is_cuda() && reduced_precision(input))
                           ? input.options().dtype(given(weight) ? weight->scalar_type() : at::kFloat)
                           : input.options();
  const Sizes sizes = {input.size(1)};
  return {mask[0] ? suggested_like(input) : Tensor(), mask[1] ? at::empty(sizes, options) : Tensor(),
          mask[2] ? at::empty(sizes, options) : Tensor()};
}

Three native_batch_norm_backward(const Tensor&, const Tensor& input, const OptionalTensor& weight,
                                 const OptionalTensor& running_mean, const OptionalTensor& running_var,
                                 const OptionalTensor& save_mean, const OptionalTensor& save_invstd, bool,
                                 double, Mask mask) {
  return batch_norm_backward(input, weight, {weight, running_mean, running_var, save_mean, save_invstd},
                             mask);
}

Three batch_norm_backward_with_reserve(const Tensor&, const Tensor& input, const Tensor& weight,
                                       const OptionalTensor& running_mean, const OptionalTensor& running_var,
                                       const OptionalTensor& save_mean, const OptionalTensor& save_var, bool,
                                       double, Mask mask, const Tensor&) {
  return batch_norm_backward(input, weight, {weight, running_mean, running_var, save_mean, save_var}, mask);
}

Two batch_norm_update_stats(const Tensor& input, const OptionalTensor& running_mean,
                            const OptionalTensor& running_var, double) {
  const auto options = statistics(input, {running_mean, running_var});
  return {at::empty({input.size(1)}, options), at::empty({input.size(1)}, options)};
}

// ---- group ----

Three native_group_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        std::int64_t batch, std::int64_t, std::int64_t, std::int64_t groups, double) {
  // The CPU kernel has float statistics for mixed types; the GPU kernel keeps them in the dtype of the input.
  const auto options = shape_device().is_cuda() ? input.options() : statistics(input, {weight, bias});
  return {shape_device().is_cuda() ? contiguous_like(input) : suggested_like(input),
          at::empty({batch, groups}, options), at::empty({batch, groups}, options)};
}

Three native_group_norm_backward(const Tensor&, const Tensor& input, const Tensor&, const Tensor&,
                                 const OptionalTensor& weight, std::int64_t, std::int64_t channels,
                                 std::int64_t, std::int64_t, Mask mask) {
  const auto parameter = [&] {
    return given(weight) ? contiguous_like(*weight) : at::empty({channels}, input.options());
  };
  return {mask[0] ? (shape_device().is_cuda() ? contiguous_like(input) : suggested_like(input)) : Tensor(),
          mask[1] ? parameter() : Tensor(), mask[2] ? parameter() : Tensor()};
}

// ---- weight ----

Two weight_norm(const Tensor& v, const Tensor& g, std::int64_t) {
  const bool in_float =
      v.scalar_type() == at::kBFloat16 || (shape_device().is_cuda() && v.scalar_type() == at::kHalf);
  return {contiguous_like(v),
          at::empty_strided(g.sizes(), g.strides(), in_float ? g.options().dtype(at::kFloat) : g.options())};
}

Two weight_norm_backward(const Tensor&, const Tensor& v, const Tensor& g, const Tensor&, std::int64_t) {
  return {contiguous_like(v), contiguous_like(g)};
}

}  // namespace

void add_normalization_shapes() {
  // The composite kernels of these two compute other statistics than the real ones.
  register_shape_function("aten::native_layer_norm", native_layer_norm);
  register_shape_function("aten::native_group_norm", native_group_norm);
  register_where_missing("aten::native_layer_norm_backward", native_layer_norm_backward);
  if (find_operator("aten::_fused_rms_norm"))
    register_shape_function("aten::_fused_rms_norm", fused_rms_norm);
  register_where_missing("aten::_fused_rms_norm_backward", fused_rms_norm_backward);
  register_where_missing("aten::native_batch_norm", native_batch_norm);
  register_where_missing("aten::_native_batch_norm_legit", native_batch_norm_legit);
  register_where_missing("aten::_native_batch_norm_legit.no_stats", native_batch_norm_legit_no_stats);
  register_where_missing("aten::_batch_norm_with_update", batch_norm_with_update);
  register_where_missing("aten::native_batch_norm_backward", native_batch_norm_backward);
  register_where_missing("aten::batch_norm_backward", batch_norm_backward_with_reserve);
  register_where_missing("aten::batch_norm_update_stats", batch_norm_update_stats);
  register_where_missing("aten::native_group_norm_backward", native_group_norm_backward);
  register_where_missing("aten::_weight_norm_interface", weight_norm);
  register_where_missing("aten::_weight_norm_interface_backward", weight_norm_backward);
}

}  // namespace penstock::detail
