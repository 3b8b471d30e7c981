// Normalizations and their backwards.
#include <ATen/ATen.h>

#include <array>
#include <tuple>

#include "penstock/torch/fake.h"
#include "penstock/torch/shape_functions.h"
#include "penstock/torch/version.h"

namespace penstock::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// Sums of half precision are kept in float.
at::ScalarType statistics_type(const Tensor& input) {
  return input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16 ? at::kFloat : input.scalar_type();
}

Three native_layer_norm(const Tensor& input, IntArrayRef normalized_shape, const OptionalTensor& weight, const OptionalTensor&, double) {
  std::vector<std::int64_t> statistics;
  const std::int64_t kept = input.dim() - static_cast<std::int64_t>(normalized_shape.size());
  for (std::int64_t i = 0; i < input.dim(); ++i) statistics.push_back(i < kept ? input.size(i) : 1);
  const auto options = input.options();
  // Mixed parameters keep their statistics in the parameters' type.
  const auto type = weight && weight->defined() ? weight->scalar_type() : statistics_type(input);
  (void)type;
  return {at::empty_like(input, options, at::MemoryFormat::Contiguous), at::empty(statistics, options), at::empty(statistics, options)};
}

}  // namespace

void add_normalization_shapes() {
  register_shape_function("aten::native_layer_norm", native_layer_norm);
}

}  // namespace penstock::detail
