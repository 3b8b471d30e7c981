// Reductions, order statistics, distances and basic linear algebra.
#include <algorithm>
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using at::OptionalIntArrayRef;
using at::Scalar;
using Two = std::tuple<Tensor, Tensor>;
using Type = c10::optional<at::ScalarType>;

// ---- over all or some dimensions ----

at::TensorOptions summed(const Tensor& self, Type dtype) {
  return self.options().dtype(dtype                                           ? *dtype
                              : c10::isIntegralType(self.scalar_type(), true) ? at::kLong
                                                                              : self.scalar_type());
}

#if PENSTOCK_TORCH_AT_LEAST(2, 0)
using Correction = const c10::optional<Scalar>&;
#else
using Correction = c10::optional<std::int64_t>;
#endif

at::TensorOptions real_options(const Tensor& self) {
  return self.options().dtype(c10::toRealValueType(self.scalar_type()));
}

Tensor variance(const Tensor& self, OptionalIntArrayRef dims, Correction, bool keepdim) {
  TORCH_CHECK(c10::isFloatingType(self.scalar_type()) || c10::isComplexType(self.scalar_type()),
              "std and var only support floating point and complex dtypes");
  return at::empty(reduced_sizes(self, dims, keepdim), real_options(self));
}
Two variance_and_mean(const Tensor& self, OptionalIntArrayRef dims, Correction, bool keepdim) {
  const Sizes sizes = reduced_sizes(self, dims, keepdim);
  return {at::empty(sizes, real_options(self)), at::empty(sizes, self.options())};
}

Tensor one_of_all(const Tensor& self) { return scalar_like(self); }
Tensor prod(const Tensor& self, Type dtype) { return at::empty({}, summed(self, dtype)); }
Tensor nansum(const Tensor& self, OptionalIntArrayRef dims, bool keepdim, Type dtype) {
  return at::empty(reduced_sizes(self, dims, keepdim), summed(self, dtype));
}
Tensor trace(const Tensor& self) { return at::empty({}, summed(self, {})); }
Tensor count_nonzero(const Tensor& self, IntArrayRef dims) {
  return at::empty(reduced_sizes(self, OptionalIntArrayRef(dims), false), self.options().dtype(at::kLong));
}
Two extremes(const Tensor& self) { return {scalar_like(self), scalar_like(self)}; }
Two extremes_along(const Tensor& self, std::int64_t dim, bool keepdim) {
  const Sizes sizes = reduced_sizes(self, dim, keepdim);
  return {at::empty(sizes, self.options()), at::empty(sizes, self.options())};
}

// ---- order statistics along a dimension ----

Two picked(const Tensor& self, std::int64_t dim, bool keepdim) {
  const Sizes sizes = reduced_sizes(self, dim, keepdim);
  return {at::empty(sizes, self.options()), at::empty(sizes, self.options().dtype(at::kLong))};
}
Two kthvalue(const Tensor& self, std::int64_t k, std::int64_t dim, bool keepdim) {
  const std::int64_t size = self.dim() > 0 ? self.size(dim) : 1;
  TORCH_CHECK(k >= 1 && k <= size, "kthvalue(): selected number k out of range for dimension ", dim);
  return picked(self, dim, keepdim);
}
Tensor argsort_stable(const Tensor& self, bool stable, std::int64_t dim, bool descending) {
  return std::get<1>(at::sort(self, c10::optional<bool>(stable), dim, descending));
}
Tensor logcumsumexp(const Tensor& self, std::int64_t) {
  return at::empty_like(self, at::MemoryFormat::Contiguous);
}
Tensor histc(const Tensor& self, std::int64_t bins, const Scalar&, const Scalar&) {
  return at::empty({bins}, self.options());
}

// ---- distances ----

Tensor cdist_forward(const Tensor& x1, const Tensor& x2, double, c10::optional<std::int64_t>) {
  // (..., rows1, width) and (..., rows2, width): the leading dimensions broadcast.
  const std::int64_t rows1 = x1.size(-2), rows2 = x2.size(-2);
  const Tensor joined =
      iterate({x1.select(-1, 0).select(-1, 0), x2.select(-1, 0).select(-1, 0)}, x1.scalar_type());
  Sizes sizes(joined.sizes().begin(), joined.sizes().end());
  sizes.push_back(rows1);
  sizes.push_back(rows2);
  return at::empty(sizes, x1.options());
}
Tensor cdist_backward(const Tensor&, const Tensor& x1, const Tensor& x2, double, const Tensor&) {
  const Tensor joined =
      iterate({x1.select(-1, 0).select(-1, 0), x2.select(-1, 0).select(-1, 0)}, x1.scalar_type());
  Sizes sizes(joined.sizes().begin(), joined.sizes().end());
  sizes.push_back(x1.size(-2));
  sizes.push_back(x1.size(-1));
  return at::empty(sizes, x1.options());
}
Tensor pdist_forward(const Tensor& self, double) {
  return at::empty({self.size(0) * (self.size(0) - 1) / 2}, self.options());
}
Tensor pdist_backward(const Tensor&, const Tensor& self, double, const Tensor&) {
  return contiguous_like(self);
}

// ---- matrices: LAPACK writes columns ----

Tensor columns_like(const Tensor& self) { return contiguous_like(self.mT()).mT(); }
Tensor cholesky(const Tensor& self, bool) {
  TORCH_CHECK(self.dim() >= 2 && self.size(-1) == self.size(-2),
              "cholesky: A must be batches of square matrices, but they are ", self.sizes());
  return self.numel() == 0 ? at::empty_like(self, at::MemoryFormat::Contiguous) : columns_like(self);
}
Tensor cholesky_solve(const Tensor& self, const Tensor&, bool) { return columns_like(self); }
Tensor solve_triangular(const Tensor& self, const Tensor& b, bool, bool left, bool) {
  const Tensor like = left ? at::matmul(self, b) : at::matmul(b, self);
  return columns_like(like);
}
Two geqrf(const Tensor& self) {
  Sizes sizes(self.sizes().begin(), self.sizes().end() - 1);
  sizes.back() = std::min(self.size(-1), self.size(-2));
  return {columns_like(self), at::empty(sizes, self.options())};
}

}  // namespace

void add_reduction_shapes() {
  for (const char* op : {"aten::var.correction", "aten::std.correction"})
    register_where_missing(op, variance);
  for (const char* op : {"aten::var_mean.correction", "aten::std_mean.correction"})
    register_where_missing(op, variance_and_mean);
  for (const char* op : {"aten::max", "aten::min", "aten::median", "aten::nanmedian"})
    register_where_missing(op, one_of_all);
  register_where_missing("aten::prod", prod);
  register_where_missing("aten::nansum", nansum);
  register_where_missing("aten::trace", trace);
  register_where_missing("aten::count_nonzero.dim_IntList", count_nonzero);
  register_where_missing("aten::_aminmax", extremes);
  register_where_missing("aten::_aminmax.dim", extremes_along);
  register_where_missing("aten::mode", picked);
  // Composite over an out= overload without a kernel for the meta device.
  for (const char* op : {"aten::median.dim", "aten::nanmedian.dim"}) register_shape_function(op, picked);
  register_shape_function("aten::kthvalue", kthvalue);
  register_where_missing("aten::argsort.stable", argsort_stable);
  register_where_missing("aten::_logcumsumexp", logcumsumexp);
  register_where_missing("aten::histc", histc);
  register_where_missing("aten::_cdist_forward", cdist_forward);
  register_where_missing("aten::_cdist_backward", cdist_backward);
  register_where_missing("aten::_pdist_forward", pdist_forward);
  register_where_missing("aten::_pdist_backward", pdist_backward);
  register_where_missing("aten::cholesky", cholesky);
  register_where_missing("aten::cholesky_inverse", cholesky);
  register_where_missing("aten::_cholesky_solve_helper", cholesky_solve);
  register_where_missing("aten::linalg_solve_triangular", solve_triangular);
  register_where_missing("aten::geqrf", geqrf);
}

}  // namespace penstock::detail
