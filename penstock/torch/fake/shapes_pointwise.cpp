// Elementwise operators: their results have the broadcast shape of the inputs.
#include <ATen/native/TypeProperties.h>

#include <tuple>

#include "penstock/operator_traits.h"
#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using at::Scalar;
using Two = std::tuple<Tensor, Tensor>;

// ---- the common case, by a table ----

enum class ResultType { Promoted, Floating, Bool, Real };

at::ScalarType result_type(ResultType rule, at::ArrayRef<Tensor> inputs) {
  if (rule == ResultType::Bool) return at::kBool;
  at::native::ResultTypeState state;
  for (const Tensor& input : inputs) state = at::native::update_result_type_state(input, state);
  const at::ScalarType promoted = at::native::result_type(state);
  if (rule == ResultType::Floating && c10::isIntegralType(promoted, true))
    return c10::typeMetaToScalarType(at::get_default_dtype());
  if (rule == ResultType::Real) return c10::toRealValueType(promoted);
  return promoted;
}

// Any overload: functional, in-place, out=.
template <ResultType rule>
void pointwise(const c10::OperatorHandle& op, Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  const std::size_t base = stack->size() - traits.arguments.size();
  c10::SmallVector<Tensor, 4> inputs;
  Tensor written;
  bool in_place = false;
  for (std::size_t i = 0; i < traits.arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[base + i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const bool is_out = traits.arguments[i].written && op.schema().arguments()[i].is_out();
    if (!is_out) inputs.push_back(value.toTensor());
    if (traits.arguments[i].written) {
      written = value.toTensor();
      in_place = !is_out;
    }
  }
  Tensor result = iterate(inputs, written.defined() ? written.scalar_type() : result_type(rule, inputs));
  if (written.defined()) {
    TORCH_CHECK(!in_place || result.sizes() == written.sizes(), "output with shape ", written.sizes(),
                " doesn't match the broadcast shape ", result.sizes());
    if (result.sizes() != written.sizes()) {
      written.resize_(result.sizes());
      written.as_strided_(result.sizes(), result.strides());
    }
    result = written;
  }
  stack->resize(base);
  stack->emplace_back(std::move(result));
}

// Some functional overloads are composite and call an out= overload without a meta kernel.
template <ResultType rule>
void add_family(const std::string& op) {
  const auto out = find_operator(op + ".out");
  if (!out || has_meta_kernel(*out)) return;
  for (const char* overload : {"", "_", ".out"})
    register_boxed<pointwise<rule>>(op + overload, /*only_missing=*/false);
}

void add_table() {
  for (const char* op : {"hardswish", "nan_to_num", "conj_physical", "floor_divide"})
    add_family<ResultType::Promoted>(std::string("aten::") + op);
  for (const char* op : {"hardswish_backward", "_add_relu.Tensor", "_add_relu.Scalar", "__lshift__.Tensor",
                         "__rshift__.Tensor", "__lshift__.Scalar", "__rshift__.Scalar"})
    register_boxed<pointwise<ResultType::Promoted>>(std::string("aten::") + op);
  for (const char* op : {"logit", "mvlgamma"}) add_family<ResultType::Floating>(std::string("aten::") + op);
  for (const char* op : {"logical_not", "logical_and", "logical_or", "logical_xor"})
    add_family<ResultType::Bool>(std::string("aten::") + op);
  register_boxed<pointwise<ResultType::Bool>>("aten::isnan");
  add_family<ResultType::Real>("aten::abs");
}

// ---- activations ----

Tensor relu(const Tensor& self) { return at::clamp_min(self, 0); }
Tensor& relu_(Tensor& self) { return self; }
Tensor hardtanh(const Tensor& self, const Scalar& low, const Scalar& high) {
  return at::clamp(self, low, high);
}
Tensor& hardtanh_(Tensor& self, const Scalar&, const Scalar&) { return self; }
Tensor hardtanh_backward(const Tensor& grad, const Tensor& self, const Scalar&, const Scalar&) {
  return iterate({grad, self}, self.scalar_type());
}
Tensor angle(const Tensor& self) {
  return iterate({self}, c10::toRealValueType(result_type(ResultType::Floating, self)));
}

// The CPU kernel saves exp(-|x|) for backward, the GPU kernel recomputes it.
Two log_sigmoid_forward(const Tensor& self) {
  if (shape_device().is_cuda()) return {at::empty_like(self), at::empty({0}, self.options())};
  return {contiguous_like(self), contiguous_like(self)};
}
Tensor log_sigmoid_backward(const Tensor& grad, const Tensor&, const Tensor&) { return at::empty_like(grad); }

Tensor glu_backward(const Tensor&, const Tensor& self, std::int64_t) { return contiguous_like(self); }
Tensor glu_jvp(const Tensor& glu, const Tensor&, const Tensor&, std::int64_t) { return at::empty_like(glu); }
Tensor masked_scale(const Tensor& self, const Tensor&, double) { return suggested_like(self); }

Tensor prelu(const Tensor& self, const Tensor&) { return suggested_like(self); }
Two prelu_backward(const Tensor&, const Tensor& self, const Tensor& weight) {
  return {suggested_like(self), contiguous_like(weight)};
}
Tensor prelu_kernel(const Tensor& self, const Tensor&) { return at::empty_like(self); }
Two prelu_kernel_backward(const Tensor& grad, const Tensor& self, const Tensor& weight) {
  return {iterate({self, weight, grad}, self.scalar_type()),
          iterate({self, weight, grad}, weight.scalar_type())};
}

Tensor rrelu_with_noise(const Tensor& self, const Tensor&, const Scalar&, const Scalar&, bool training,
                        c10::optional<at::Generator>) {
  return training ? contiguous_like(self) : at::leaky_relu(self, 0.2);
}

// ---- two and three inputs ----

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  return iterate({condition, self, other}, at::result_type(self, other));
}

Tensor rsub(const Tensor& self, const Tensor& other, const Scalar& alpha) {
  return at::sub(other, self, alpha);
}
Tensor remainder(const Scalar& self, const Tensor& other) {
  return at::remainder(at::scalar_tensor(self, other.options()), other);
}

// ---- scalars from two vectors ----

Tensor dot(const Tensor& self, const Tensor& other) {
  TORCH_CHECK(self.dim() == 1 && other.dim() == 1, "1D tensors expected, but got ", self.dim(), "D and ",
              other.dim(), "D tensors");
  TORCH_CHECK(self.numel() == other.numel(), "inconsistent tensor size, expected tensor ", self.sizes(),
              " and src ", other.sizes(), " to have the same number of elements");
  return scalar_like(self);
}

Tensor addbmm(const Tensor&, const Tensor& batch1, const Tensor& batch2, const Scalar&, const Scalar&) {
  return at::empty({batch1.size(1), batch2.size(2)}, batch1.options());
}

Tensor int_mm(const Tensor& self, const Tensor& other) {
  return at::empty({self.size(0), other.size(1)}, self.options().dtype(at::kInt));
}

}  // namespace

void add_pointwise_shapes() {
  add_table();
  register_where_missing("aten::relu", relu);
  register_where_missing("aten::relu_", relu_);
  register_where_missing("aten::hardtanh", hardtanh);
  register_where_missing("aten::hardtanh_", hardtanh_);
  register_where_missing("aten::hardtanh_backward", hardtanh_backward);
  register_where_missing("aten::angle", angle);
  register_where_missing("aten::log_sigmoid_forward", log_sigmoid_forward);
  register_where_missing("aten::log_sigmoid_backward", log_sigmoid_backward);
  register_where_missing("aten::glu_backward", glu_backward);
  register_where_missing("aten::glu_jvp", glu_jvp);
  register_where_missing("aten::_masked_scale", masked_scale);
  register_where_missing("aten::prelu", prelu);
  register_where_missing("aten::prelu_backward", prelu_backward);
  register_where_missing("aten::_prelu_kernel", prelu_kernel);
  register_where_missing("aten::_prelu_kernel_backward", prelu_kernel_backward);
  register_where_missing("aten::rrelu_with_noise", rrelu_with_noise);
  register_where_missing("aten::where.self", where);
  register_where_missing("aten::rsub.Tensor", rsub);
  register_where_missing("aten::remainder.Scalar_Tensor", remainder);
  register_where_missing("aten::dot", dot);
  register_where_missing("aten::vdot", dot);
  register_where_missing("aten::addbmm", addbmm);
  register_where_missing("aten::_int_mm", int_mm);
}

}  // namespace penstock::detail
