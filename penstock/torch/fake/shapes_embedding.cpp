// Lookup by index: embeddings, indexing, gather and scatter operators.
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Indices = c10::List<c10::optional<Tensor>>;

void refuse_masks(const char* op, const Indices& indices) {
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const OptionalTensor index = indices.get(i);
    if (given(index) && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
      throw DataDependentError(
          std::string(op) +
          ": how many elements a mask picks depends on values, which a fake tensor does not have; use " +
          "where or masked_fill, or run this step with real tensors");
  }
}

Tensor index(const Tensor& self, const Indices& indices) {
  refuse_masks("aten::index.Tensor", indices);
  return at::index(self, indices);
}

Tensor& index_out(const Tensor& self, const Indices& indices, Tensor& out) {
  refuse_masks("aten::index.Tensor_out", indices);
  return at::index_out(out, self, indices);
}

// Writing through a mask changes no shape.
Tensor& index_put_(Tensor& self, const Indices&, const Tensor&, bool) { return self; }
Tensor& index_put_impl_(Tensor& self, const Indices&, const Tensor&, bool, bool) { return self; }
Tensor index_put(const Tensor& self, const Indices&, const Tensor&, bool) { return at::empty_like(self); }

Tensor index_select(const Tensor& self, std::int64_t dim, const Tensor& index) {
  TORCH_CHECK_INDEX(index.dim() <= 1, "index_select(): Index is supposed to be a vector");
  if (self.dim() == 0) return scalar_like(self);
  Sizes sizes(self.sizes().begin(), self.sizes().end());
  sizes[static_cast<std::size_t>(at::maybe_wrap_dim(dim, self.dim()))] = index.numel();
  return at::empty(sizes, self.options());
}

Tensor take(const Tensor& self, const Tensor& index) { return at::empty(index.sizes(), self.options()); }

Tensor embedding(const Tensor& weight, const Tensor& indices, std::int64_t, bool, bool) {
  TORCH_CHECK(weight.dim() == 2, "'weight' must be 2-D");
  TORCH_CHECK(indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt,
              "Expected tensor for argument 'indices' to have one of the ",
              "following scalar types: Long, Int; but got ", indices.toString(), " instead");
  Sizes sizes(indices.sizes().begin(), indices.sizes().end());
  sizes.push_back(weight.size(1));
  return at::empty(sizes, weight.options());
}

Tensor embedding_dense_backward(const Tensor& grad, const Tensor&, std::int64_t rows, std::int64_t, bool) {
  return at::empty({rows, grad.size(-1)}, grad.options());
}

// ---- bags ----

constexpr std::int64_t kModeSum = 0, kModeMean = 1, kModeMax = 2;

Four embedding_bag(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                   bool scale_grad_by_freq, std::int64_t mode, const OptionalTensor& per_sample_weights,
                   bool include_last_offset, std::int64_t padding, bool forward_only) {
  const std::int64_t bags = offsets.size(0) - (include_last_offset ? 1 : 0);
  const auto counters = [&](IntArrayRef sizes) { return at::empty(sizes, offsets.options()); };
  const Tensor output = at::empty({bags, weight.size(1)}, weight.options());
  if (shape_device().is_cuda()) {
    const Tensor maximum = mode == kModeMax ? at::empty({bags, weight.size(1)}, indices.options())
                                            : at::empty({0}, indices.options());
    return {output, at::empty({indices.size(0)}, indices.options()), counters({bags}), maximum};
  }
  // Which auxiliary results the CPU kernel computes depends on whether its fast path applies.
  const bool fast_type = weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kHalf ||
                         (PENSTOCK_TORCH_AT_LEAST(2, 0) && weight.scalar_type() == at::kBFloat16);
  const bool fast =
      fast_type && weight.stride(1) == 1 && padding < 0 &&
      (mode == kModeSum || (mode == kModeMean && !scale_grad_by_freq && !given(per_sample_weights)));
  const Tensor bag_sizes = counters({bags});
  Tensor offset2bag =
      at::empty({fast && (forward_only || mode != kModeMax) ? 0 : indices.size(0)}, indices.options());
  Tensor maximum = mode == kModeMax ? counters({bags, weight.size(1)}) : counters({bags});
  return {output, offset2bag, bag_sizes, maximum};
}

Four embedding_bag_training(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool scale,
                            std::int64_t mode, bool, const OptionalTensor& per_sample_weights,
                            bool include_last_offset, std::int64_t padding) {
  return embedding_bag(weight, indices, offsets, scale, mode, per_sample_weights, include_last_offset,
                       padding, false);
}

Four embedding_bag_forward_only(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                                bool scale, std::int64_t mode, bool, const OptionalTensor& per_sample_weights,
                                bool include_last_offset, std::int64_t padding) {
  return embedding_bag(weight, indices, offsets, scale, mode, per_sample_weights, include_last_offset,
                       padding, true);
}

Tensor embedding_bag_backward(const Tensor& grad, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, std::int64_t rows, bool, std::int64_t, bool sparse,
                              const OptionalTensor&, std::int64_t) {
  if (sparse)
    throw NotImplemented(
        "aten::_embedding_bag_backward: sparse gradients have no fake form; construct the bag with "
        "sparse(false)");
  return at::empty({rows, grad.size(1)}, grad.options());
}

Tensor embedding_bag_dense_backward(const Tensor& grad, const Tensor&, const Tensor&, const Tensor&,
                                    const Tensor&, std::int64_t rows, bool, std::int64_t,
                                    const OptionalTensor&, std::int64_t) {
  return at::empty({rows, grad.size(1)}, grad.options());
}

Tensor embedding_bag_weights_backward(const Tensor& grad, const Tensor&, const Tensor& indices, const Tensor&,
                                      const Tensor&, std::int64_t, std::int64_t) {
  return at::empty({indices.size(0)}, grad.options());
}

// ---- moving elements ----

Tensor diag(const Tensor& self, std::int64_t diagonal) {
  TORCH_CHECK(self.dim() == 1 || self.dim() == 2, "diag(): Supports 1D or 2D tensors. Got ", self.dim(), "D");
  if (self.dim() == 2) return contiguous_like(self.diagonal(diagonal));
  const std::int64_t side = self.size(0) + std::abs(diagonal);
  return at::empty({side, side}, self.options());
}

Tensor flip(const Tensor& self, IntArrayRef) { return at::empty_like(self); }

Tensor roll(const Tensor& self, IntArrayRef shifts, IntArrayRef dims) {
  TORCH_CHECK(!shifts.empty(), "`shifts` required");
  if (self.numel() == 0) return at::empty_like(self);
  if (shape_device().is_cuda()) return contiguous_like(self);
  if (dims.empty()) return contiguous_like(self);
  TORCH_CHECK(shifts.size() == dims.size(), "shifts and dimensions must align. shifts: ", shifts.size(),
              ", dims:", dims.size());
  Tensor rolled = self;  // one dimension after the other, each by joining two parts
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const std::int64_t size = rolled.size(dims[i]);
    const std::int64_t start = ((size - shifts[i]) % size + size) % size;
    rolled =
        at::cat({rolled.narrow(dims[i], start, size - start), rolled.narrow(dims[i], 0, start)}, dims[i]);
  }
  return rolled;
}

Tensor unfold_backward(const Tensor& grad, IntArrayRef input_sizes, std::int64_t, std::int64_t,
                       std::int64_t) {
  return at::empty(input_sizes, grad.options());
}

Tensor triangle_indices(std::int64_t rows, std::int64_t columns, std::int64_t offset, bool lower,
                        at::ScalarType dtype) {
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t first = std::min(std::max<std::int64_t>(row + offset + (lower ? 1 : 0), 0), columns);
    count += lower ? first : columns - first;
  }
  return at::empty({2, count}, at::dtype(dtype).device(at::kMeta));
}

// The kernel selects by the mask, but the result has the size of the scattered tensor.
Tensor masked_scatter_backward(const Tensor& grad, const Tensor&, IntArrayRef sizes) {
  return at::empty(sizes, grad.options());
}

Tensor tril_indices(std::int64_t rows, std::int64_t columns, std::int64_t offset,
                    c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>, c10::optional<at::Device>,
                    c10::optional<bool>) {
  return triangle_indices(rows, columns, offset, true, dtype.value_or(at::kLong));
}

Tensor triu_indices(std::int64_t rows, std::int64_t columns, std::int64_t offset,
                    c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>, c10::optional<at::Device>,
                    c10::optional<bool>) {
  return triangle_indices(rows, columns, offset, false, dtype.value_or(at::kLong));
}

#if PENSTOCK_TORCH_AT_LEAST(2, 1)
using Text = std::string_view;
#else
using Text = c10::string_view;
#endif

Tensor bucketize(const Tensor& self, const Tensor&, bool in_int32, bool) {
  return at::empty(self.sizes(), self.options().dtype(in_int32 ? at::kInt : at::kLong));
}

Tensor searchsorted(const Tensor&, const Tensor& self, bool in_int32, bool, c10::optional<Text>,
                    const OptionalTensor&) {
  return at::empty(self.sizes(), self.options().dtype(in_int32 ? at::kInt : at::kLong));
}

}  // namespace

void add_embedding_shapes() {
  // LibTorch has kernels for these, but with a mask they would read its values.
  register_shape_function("aten::index.Tensor", index);
  register_shape_function("aten::index.Tensor_out", index_out);
  register_shape_function("aten::index_put_", index_put_);
  register_shape_function("aten::_index_put_impl_", index_put_impl_);
  register_shape_function("aten::index_put", index_put);
  register_shape_function("aten::embedding", embedding);
  register_where_missing("aten::index_select", index_select);
  register_where_missing("aten::take", take);
  register_where_missing("aten::embedding_dense_backward", embedding_dense_backward);
  register_where_missing("aten::_embedding_bag", embedding_bag_training);
  register_where_missing("aten::_embedding_bag_forward_only", embedding_bag_forward_only);
  register_where_missing("aten::_embedding_bag_backward", embedding_bag_backward);
  register_where_missing("aten::_embedding_bag_dense_backward", embedding_bag_dense_backward);
  register_where_missing("aten::_embedding_bag_per_sample_weights_backward", embedding_bag_weights_backward);
#if !PENSTOCK_TORCH_AT_LEAST(2, 0)
  register_shape_function("aten::diag", diag);  // composite in later versions
#else
  (void)&diag;
#endif
  register_where_missing("aten::flip", flip);
  register_where_missing("aten::roll", roll);
  register_where_missing("aten::unfold_backward", unfold_backward);
  if (find_operator("aten::masked_scatter_backward"))
    register_shape_function("aten::masked_scatter_backward", masked_scatter_backward);
  register_where_missing("aten::tril_indices", tril_indices);
  register_where_missing("aten::triu_indices", triu_indices);
  register_where_missing("aten::bucketize.Tensor", bucketize);
  register_where_missing("aten::searchsorted.Tensor", searchsorted);
}

}  // namespace penstock::detail
