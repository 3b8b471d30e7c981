// Random operators: shapes only; no generator is advanced.
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"
#include "penstock/torch/random/generator_state.h"

namespace penstock::detail {
namespace {

using Generator = c10::optional<at::Generator>;
using Two = std::tuple<Tensor, Tensor>;

Two native_dropout(const Tensor& input, double, c10::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  const Tensor mask = at::empty_like(input, mask_options);
  const bool by_product = !shape_device().is_cuda() && train.value_or(true) && input.numel() > 0;
  return {by_product ? at::mul(input, mask) : at::empty_like(input), mask};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double) {
  return shape_device().is_cuda() ? at::empty_like(grad) : at::mul(grad, mask);
}

Tensor multinomial(const Tensor& self, std::int64_t samples, bool replacement, Generator) {
  TORCH_CHECK(self.dim() == 1 || self.dim() == 2, "prob_dist must be 1 or 2 dim");
  TORCH_CHECK(samples > 0 && (replacement || samples <= self.size(-1)),
              "cannot sample n_sample > prob_dist.size(-1) samples without replacement");
  Sizes sizes = {samples};
  if (self.dim() == 2) sizes.insert(sizes.begin(), self.size(0));
  return at::empty(sizes, self.options().dtype(at::kLong));
}

Tensor drawn(const Tensor& self, Generator) { return contiguous_like(self); }
Tensor binomial(const Tensor& count, const Tensor&, Generator) { return contiguous_like(count); }
Tensor standard_gamma_grad(const Tensor& self, const Tensor& output) {
  return iterate({self, output}, self.scalar_type());
}
Tensor dirichlet_grad(const Tensor& x, const Tensor&, const Tensor&) { return contiguous_like(x); }

Tensor permutation(std::int64_t count, c10::optional<at::ScalarType> dtype) {
  TORCH_CHECK(count >= 0, "n must be non-negative, got ", count);
  return at::empty({count}, at::dtype(dtype.value_or(at::kLong)).device(at::kMeta));
}
Tensor randperm(std::int64_t count, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                c10::optional<at::Device>, c10::optional<bool>) {
  return permutation(count, dtype);
}
Tensor randperm_generator(std::int64_t count, Generator, c10::optional<at::ScalarType> dtype,
                          c10::optional<at::Layout>, c10::optional<at::Device>, c10::optional<bool>) {
  return permutation(count, dtype);
}

// On the CPU, whatever the device of the generator is.
Tensor state_of_generator(at::Device generator) {
  const GeneratorStateForm form = generator_state_form(generator.type());
  return at::empty({form.numel}, at::dtype(form.dtype).device(at::kMeta));
}
void set_state_of_generator(const Tensor&, at::Device) {}

// A tensor of zeros without memory; only used by derivatives.
Tensor efficient_zeros(IntArrayRef sizes, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                       c10::optional<at::Device>, c10::optional<bool>) {
  return at::empty(
      sizes, at::dtype(dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype()))).device(at::kMeta));
}

}  // namespace

void add_random_shapes() {
  register_where_missing("aten::native_dropout", native_dropout);
  register_where_missing("aten::native_dropout_backward", native_dropout_backward);
  register_where_missing("aten::multinomial", multinomial);
  for (const char* op : {"aten::poisson", "aten::_standard_gamma", "aten::_sample_dirichlet"})
    register_where_missing(op, drawn);
  register_where_missing("aten::binomial", binomial);
  register_where_missing("aten::_standard_gamma_grad", standard_gamma_grad);
  register_where_missing("aten::_dirichlet_grad", dirichlet_grad);
  register_where_missing("aten::_efficientzerotensor", efficient_zeros);
  // Composite over an out= overload that fills memory.
  register_shape_function("aten::randperm", randperm);
  register_shape_function("aten::randperm.generator", randperm_generator);
  register_shape_function("penstock::generator_state", state_of_generator);
  register_shape_function("penstock::set_generator_state", set_state_of_generator);
}

}  // namespace penstock::detail
