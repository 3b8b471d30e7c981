#include "penstock/torch/tree/dense_layout.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/tree/tensor_text.h"

namespace penstock {

namespace {

bool has_no_elements(at::IntArrayRef sizes) {
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

TensorMeta with_local_strides(const TensorMeta& meta, std::vector<std::int64_t> strides) {
  const TensorRecord& local = local_record(meta);
  TensorRecord changed(local.shape(), std::move(strides), local.dtype(), local.requires_grad());
  const auto* whole = std::get_if<DistributedRecord>(&meta);
  if (whole == nullptr) return changed;
  return DistributedRecord(std::move(changed), whole->global_shape(), whole->global_stride(),
                           whole->placements(), whole->mesh_key());
}

}  // namespace

bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (has_no_elements(sizes)) return true;
  std::vector<std::size_t> dims;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] != 1) dims.push_back(i);
  std::sort(dims.begin(), dims.end(), [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  std::int64_t expected = 1;
  for (const std::size_t dim : dims) {
    if (strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

std::vector<std::int64_t> dense_strides(at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (is_dense(sizes, strides)) return strides.vec();
  return at::infer_dense_strides(sizes, strides);
}

bool same_layout(at::IntArrayRef sizes, at::IntArrayRef strides, at::IntArrayRef others) {
  if (has_no_elements(sizes)) return true;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] != 1 && strides[i] != others[i]) return false;
  return true;
}

at::Tensor in_layout(const at::Tensor& tensor, at::IntArrayRef strides) {
  if (!tensor.is_conj() && !tensor.is_neg() && same_layout(tensor.sizes(), tensor.strides(), strides))
    return tensor;
  const at::NoGradGuard no_grad;
  at::Tensor copy = at::empty_strided(tensor.sizes(), strides, tensor.options().requires_grad(false));
  copy.copy_(tensor);
  return copy;
}

at::Tensor memory_of(const at::Tensor& dense) {
  if (dense.is_contiguous()) return dense;
  if (!is_dense(dense.sizes(), dense.strides()))
    throw ValueError(describe("memory of a tensor as one block",
                              "strides " + shape_text(dense.strides()) + " for " + describe_tensor(dense),
                              "a dense layout", "copy it with in_layout first"));
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

TensorMeta dense_meta(const TensorMeta& meta) {
  const TensorRecord& local = local_record(meta);
  if (is_dense(local.shape(), local.stride())) return meta;
  return with_local_strides(meta, dense_strides(local.shape(), local.stride()));
}

TensorMeta comparable_meta(const TensorMeta& meta) {
  const TensorRecord& local = local_record(meta);
  std::vector<std::int64_t> strides = dense_strides(local.shape(), local.stride());
  const std::vector<std::int64_t> contiguous =
      TensorRecord::contiguous(local.shape(), local.dtype()).stride();
  for (std::size_t i = 0; i < strides.size(); ++i)
    if (local.shape()[i] == 1 || has_no_elements(local.shape())) strides[i] = contiguous[i];
  return with_local_strides(meta, std::move(strides));
}

}  // namespace penstock
