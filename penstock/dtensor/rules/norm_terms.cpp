#include "penstock/dtensor/rules/norm_terms.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "penstock/dtensor/tensor/rule_helpers.h"

namespace penstock::detail {

bool NormTerms::largest() const { return std::isinf(order_) && order_ > 0; }
bool NormTerms::smallest() const { return std::isinf(order_) && order_ < 0; }

at::Tensor NormTerms::of(const at::Tensor& local, const std::vector<std::int64_t>& dims) const {
  const at::ScalarType real = c10::toRealValueType(local.scalar_type());
  const at::ScalarType dtype = real == at::kDouble ? at::kDouble : at::kFloat;
  bool nothing = false;
  std::vector<std::int64_t> shape = local.sizes().vec();
  for (const std::int64_t dim : dims) {
    nothing |= local.size(dim) == 0;
    shape[static_cast<std::size_t>(dim)] = 1;
  }
  if (nothing)
    return local.new_full(shape, smallest() ? std::numeric_limits<double>::infinity() : 0.0,
                          local.options().dtype(dtype));
  const bool complex = c10::isComplexType(local.scalar_type());
  const at::Tensor sizes = complex ? local.abs().to(dtype) : local.to(dtype);
  if (dims.empty()) {
    // No dim to reduce: a tensor of one element.
    const at::Tensor size = sizes.abs();
    return std::isinf(order_) ? size : order_ == 0 ? size.ne(0).to(dtype) : size.pow(order_);
  }
  const at::Tensor norm = at::linalg_vector_norm(sizes, order_, dims, true, c10::nullopt);
  return std::isinf(order_) || order_ == 0 ? norm : order_ == 2 ? norm.mul(norm) : norm.pow(order_);
}

void NormTerms::reduce(const comm::MeshGroups& mesh, const std::vector<int>& axes, at::Tensor& terms) const {
  if (axes.empty()) return;
  if (!std::isinf(order_)) {
    terms = terms.contiguous();
    reduce_over(mesh, axes, terms, comm::ReduceOp::Sum);
    return;
  }
  // Not every backend propagates NaN in a maximum, so it is sent separately.
  const at::Tensor lost = terms.isnan();
  const at::Tensor values =
      (smallest() ? terms.neg() : terms).masked_fill(lost, -std::numeric_limits<double>::infinity());
  const at::Tensor both = at::stack({values, lost.to(terms.scalar_type())});
  reduce_over(mesh, axes, both, comm::ReduceOp::Max);
  terms = (smallest() ? both[0].neg() : both[0])
              .masked_fill(both[1].gt(0), std::numeric_limits<double>::quiet_NaN());
}

at::Tensor NormTerms::norm(const at::Tensor& terms) const {
  if (std::isinf(order_) || order_ == 0) return terms;
  return order_ == 2 ? terms.sqrt() : terms.pow(1 / order_);
}

}  // namespace penstock::detail
