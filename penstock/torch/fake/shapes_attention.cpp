// Fused attention and the fused cells of recurrent networks.
#include <array>
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Scale = c10::optional<double>;

// ---- attention: query (batch, heads, length, width); kernels work on (batch, length, heads, width) ----

Tensor heads_inside(const Tensor& query, std::int64_t width) {
  return at::empty({query.size(0), query.size(2), query.size(1), width}, query.options()).transpose(1, 2);
}

at::TensorOptions in_float(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor.options() : tensor.options().dtype(at::kFloat);
}

Two flash_for_cpu(const Tensor& query, const Tensor&, const Tensor& value, double, bool,
                  const OptionalTensor&, Scale) {
  // Newer kernels give the result the layout of the query. The sums are stored as (batch, length, heads).
  const bool as_query = PENSTOCK_TORCH_AT_LEAST(2, 6) && value.size(3) == query.size(3);
  return {as_query ? at::empty_like(query) : heads_inside(query, value.size(3)),
          at::empty({query.size(0), query.size(2), query.size(1)}, in_float(query)).transpose(1, 2)};
}

Three flash_for_cpu_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor&, const Tensor&, double, bool, const OptionalTensor&, Scale) {
  return {heads_inside(query, query.size(3)), heads_inside(key, key.size(3)),
          heads_inside(value, value.size(3))};
}

#if PENSTOCK_TORCH_AT_LEAST(2, 3)
using Flash = std::tuple<Tensor, Tensor, Tensor, Tensor, std::int64_t, std::int64_t, Tensor, Tensor, Tensor>;

// The GPU kernels. Their random state is on the CPU, which a shape function cannot express; only backward
// reads it.
Flash flash_for_gpu(const Tensor& query, const Tensor& key, const Tensor& value, double, bool, bool, Scale) {
  const Tensor state = at::empty({2}, query.options().dtype(at::kUInt64));
  return {heads_inside(query, value.size(3)),
          at::empty({query.size(0), query.size(1), query.size(2)}, in_float(query)),
          Tensor(),
          Tensor(),
          query.size(2),
          key.size(2),
          state,
          at::empty({}, query.options().dtype(at::kUInt64)),
          at::empty({0}, query.options())};
}

Three flash_for_gpu_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t,
                             std::int64_t, double, bool, const Tensor&, const Tensor&, Scale) {
  return {heads_inside(query, query.size(3)), heads_inside(key, key.size(3)),
          heads_inside(value, value.size(3))};
}

Four efficient(const Tensor& query, const Tensor&, const Tensor& value, const OptionalTensor&,
               bool compute_log_sumexp, double, bool, Scale) {
  constexpr std::int64_t kAlignment = 32;
  const std::int64_t rows =
      compute_log_sumexp ? (query.size(2) + kAlignment - 1) / kAlignment * kAlignment : 0;
  const Tensor number = at::empty({}, query.options().dtype(at::kLong));
  return {heads_inside(query, value.size(3)),
          at::empty({query.size(0), query.size(1), rows}, in_float(query)), number, at::empty_like(number)};
}

Four efficient_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& bias, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        double, std::array<bool, 4> mask, bool, Scale) {
  return {heads_inside(query, query.size(3)), heads_inside(key, key.size(3)),
          heads_inside(value, value.size(3)), mask[3] && bias.defined() ? at::empty_like(bias) : Tensor()};
}

#if PENSTOCK_TORCH_AT_LEAST(2, 6)
// The result has the layout of the query.
Flash cudnn(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor&, bool, double,
            bool, bool, Scale) {
  const Tensor number = at::empty({}, query.options().dtype(at::kLong));
  const Tensor output =
      value.size(3) == query.size(3) ? at::empty_like(query) : heads_inside(query, value.size(3));
  return {output,
          at::empty({query.size(0), query.size(1), query.size(2), 1}, query.options().dtype(at::kFloat)),
          Tensor(),
          Tensor(),
          query.size(2),
          key.size(2),
          number,
          at::empty_like(number),
          Tensor()};
}

Three cudnn_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                     const Tensor&, std::int64_t, std::int64_t, double, bool, Scale) {
  return {at::empty_like(query), at::empty_like(key), at::empty_like(value)};
}

void add_cudnn_attention() {
  register_where_missing("aten::_scaled_dot_product_cudnn_attention", cudnn);
  register_where_missing("aten::_scaled_dot_product_cudnn_attention_backward", cudnn_backward);
}
#else
void add_cudnn_attention() {}
#endif

void add_gpu_attention() {
  add_cudnn_attention();
  register_where_missing("aten::_scaled_dot_product_flash_attention", flash_for_gpu);
  register_where_missing("aten::_scaled_dot_product_flash_attention_backward", flash_for_gpu_backward);
  register_where_missing("aten::_scaled_dot_product_efficient_attention", efficient);
  register_where_missing("aten::_scaled_dot_product_efficient_attention_backward", efficient_backward);
}
#else
void add_gpu_attention() {}
#endif

Two multi_head_attention(const Tensor& query, const Tensor& key, const Tensor&, std::int64_t width,
                         std::int64_t heads, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const OptionalTensor&, bool need_weights, bool average,
                         c10::optional<std::int64_t>) {
  const std::int64_t batch = query.size(0), length = query.size(1), keys = key.size(1);
  const Tensor output = at::empty({batch, length, width}, query.options());
  if (!need_weights) return {output, Tensor()};
  return {output, average ? at::empty({batch, length, keys}, query.options())
                          : at::empty({batch, heads, length, keys}, query.options())};
}

Tensor masked_softmax(const Tensor& self, const Tensor&, c10::optional<std::int64_t>,
                      c10::optional<std::int64_t>) {
  return contiguous_like(self);
}
Tensor masked_softmax_backward(const Tensor& grad, const Tensor&, const Tensor&,
                               c10::optional<std::int64_t>) {
  return contiguous_like(grad);
}

Three rescaled_qkv(const Tensor& qkv, const Tensor&, std::int64_t heads) {
  const auto part = [&] {
    return at::empty({qkv.size(0), heads, qkv.size(1), qkv.size(2) / 3 / heads}, qkv.options());
  };
  return {part(), part(), part()};
}

// ---- cells that have fused GPU kernels ----

Three lstm_cell(const Tensor& input_gates, const Tensor&, const Tensor& cx, const OptionalTensor&,
                const OptionalTensor&) {
  return {contiguous_like(cx), contiguous_like(cx), contiguous_like(input_gates)};
}
Three lstm_cell_backward(const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx,
                         const Tensor&, const Tensor& workspace, bool has_bias) {
  if (!given(grad_hy) && !given(grad_cy)) return {Tensor(), Tensor(), Tensor()};
  return {contiguous_like(workspace), contiguous_like(cx),
          has_bias ? at::empty({workspace.size(1)}, workspace.options()) : Tensor()};
}
Two gru_cell(const Tensor&, const Tensor&, const Tensor& hx, const OptionalTensor&, const OptionalTensor&) {
  constexpr std::int64_t kKept = 5;  // saved gates and products per unit
  return {contiguous_like(hx), at::empty({hx.size(0), hx.size(1) * kKept}, hx.options())};
}
Five gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const std::int64_t hidden = grad_hy.size(1);
  const auto gates = [&] { return at::empty({workspace.size(0), hidden * 3}, workspace.options()); };
  const auto bias = [&] { return has_bias ? at::empty({hidden * 3}, workspace.options()) : Tensor(); };
  return {gates(), gates(), contiguous_like(grad_hy), bias(), bias()};
}

}  // namespace

void add_attention_shapes() {
  register_where_missing("aten::_scaled_dot_product_flash_attention_for_cpu", flash_for_cpu);
  register_where_missing("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                         flash_for_cpu_backward);
  add_gpu_attention();
  register_where_missing("aten::_native_multi_head_attention", multi_head_attention);
  register_where_missing("aten::_masked_softmax", masked_softmax);
  register_where_missing("aten::_masked_softmax_backward", masked_softmax_backward);
  register_where_missing("aten::_transform_bias_rescale_qkv", rescaled_qkv);
  register_where_missing("aten::_thnn_fused_lstm_cell", lstm_cell);
  register_where_missing("aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  register_where_missing("aten::_thnn_fused_gru_cell", gru_cell);
  register_where_missing("aten::_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace penstock::detail
