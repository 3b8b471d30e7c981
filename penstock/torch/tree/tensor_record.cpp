#include "penstock/torch/tree/tensor_record.h"

#include <ATen/ops/empty_strided.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/hash.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/dtype.h"
#include "penstock/torch/tree/distributed_type.h"
#include "penstock/torch/tree/tensor_text.h"

namespace penstock {

namespace {

// Returns std::nullopt if a stride overflows. As in LibTorch, a dim of size 0 counts as 1 for the dims before
// it.
std::optional<std::vector<std::int64_t>> contiguous_stride(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> stride(shape.size());
  std::int64_t next = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    stride[i] = next;
    if (__builtin_mul_overflow(next, std::max<std::int64_t>(shape[i], 1), &next)) return std::nullopt;
  }
  return stride;
}

// Returns the bytes from the first element to the end of the last, or std::nullopt on overflow.
std::optional<std::int64_t> bytes_spanned(const std::vector<std::int64_t>& shape,
                                          const std::vector<std::int64_t>& stride, std::int64_t item_bytes) {
  std::int64_t numel = 1;
  std::int64_t elements = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(numel, shape[i], &numel)) return std::nullopt;
    if (shape[i] == 0) continue;
    if (__builtin_mul_overflow(shape[i] - 1, stride[i], &reach) ||
        __builtin_add_overflow(elements, reach, &elements))
      return std::nullopt;
  }
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(numel == 0 ? 0 : elements, item_bytes, &bytes)) return std::nullopt;
  // An expanded tensor spans little memory but may still have more bytes than can be counted.
  std::int64_t dense_bytes = 0;
  if (__builtin_mul_overflow(numel, item_bytes, &dense_bytes)) return std::nullopt;
  return bytes;
}

[[noreturn]] void refuse_record(std::string_view what, const std::string& actual, std::string_view expected,
                                std::string_view remedy = {}) {
  throw ValueError(describe(fmt::format("tensor record: {}", what), actual, expected, remedy));
}

void check_numbers(std::string_view name, const std::vector<std::int64_t>& numbers) {
  if (std::any_of(numbers.begin(), numbers.end(), [](std::int64_t n) { return n < 0; }))
    refuse_record(name, shape_text(numbers), "no negative number");
}

}  // namespace

TensorRecord::TensorRecord(std::vector<std::int64_t> shape, std::vector<std::int64_t> stride,
                           at::ScalarType dtype, bool requires_grad)
    : shape_(std::move(shape)), stride_(std::move(stride)), dtype_(dtype), requires_grad_(requires_grad) {
  if (shape_.size() != stride_.size())
    refuse_record("shape and stride", fmt::format("{} and {}", shape_text(shape_), shape_text(stride_)),
                  "the same number of dims");
  check_numbers("shape", shape_);
  check_numbers("stride", stride_);
  if (!dtype_number(dtype_))
    refuse_record("dtype", dtype_name(dtype_), "a type that has a number (docs/messages.md)",
                  "dequantize a quantized tensor first");
  if (requires_grad_ && !at::isFloatingType(dtype_) && !at::isComplexType(dtype_))
    refuse_record("requires_grad", fmt::format("true for {}", dtype_name(dtype_)),
                  "a floating point or complex type");
  if (!bytes_spanned(shape_, stride_, static_cast<std::int64_t>(c10::elementSize(dtype_))))
    refuse_record("size",
                  fmt::format("{}{} stride {}", dtype_name(dtype_), shape_text(shape_), shape_text(stride_)),
                  "fewer bytes than 2^63");
}

TensorRecord TensorRecord::contiguous(std::vector<std::int64_t> shape, at::ScalarType dtype,
                                      bool requires_grad) {
  check_numbers("shape", shape);
  auto stride = contiguous_stride(shape);
  if (!stride) refuse_record("size", dtype_name(dtype) + shape_text(shape), "fewer bytes than 2^63");
  return TensorRecord(std::move(shape), std::move(*stride), dtype, requires_grad);
}

std::int64_t TensorRecord::numel() const {
  return std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t TensorRecord::storage_bytes() const {
  return *bytes_spanned(shape_, stride_, static_cast<std::int64_t>(c10::elementSize(dtype_)));
}

TensorRecord TensorRecord::with_requires_grad(bool requires_grad) const {
  return TensorRecord(shape_, stride_, dtype_, requires_grad);
}

std::size_t TensorRecord::hash() const {
  HashBuilder builder;
  builder.add(shape_.size());
  for (const std::int64_t size : shape_) builder.add(size);
  for (const std::int64_t step : stride_) builder.add(step);
  return builder.add(static_cast<int>(dtype_)).add(requires_grad_).value();
}

TensorRecord detail::record_of_attributes(const at::Tensor& tensor) {
  const auto refuse_tensor = [&](std::string_view what, std::string_view expected, std::string_view remedy) {
    throw PipeliningMetadataError(describe("record of a tensor", what, expected, remedy));
  };
  if (!tensor.defined())
    refuse_tensor("an undefined tensor", "a tensor", "use an empty entry where a missing tensor is allowed");
  if (tensor.layout() != at::kStrided || tensor.is_nested())
    refuse_tensor("a sparse, nested or opaque tensor", "a dense tensor with strides",
                  "convert it first, e.g. by to_dense()");
  if (tensor.is_quantized())
    refuse_tensor(describe_tensor(tensor), "a type that needs no scale and zero point",
                  "send int_repr() and the scale, or dequantize()");
  if (!dtype_number(tensor.scalar_type()))
    refuse_tensor(describe_tensor(tensor), "a type that has a number (docs/messages.md)",
                  "convert it with to(dtype)");
  return TensorRecord(tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(),
                      tensor.requires_grad());
}

TensorRecord record_of(const at::Tensor& tensor) {
  if (tensor.defined() && is_distributed_tensor(tensor))
    throw PipeliningMetadataError(
        describe("record_of", "a distributed tensor", "a plain one",
                 "call distributed_record_of(tensor) for its record, meta_of(tensor) for the record of "
                 "either kind, or "
                 "record_of(local_if_distributed(tensor)) for the record of its local part"));
  return detail::record_of_attributes(tensor);
}

at::Tensor make_raw_tensor(const TensorRecord& record, at::Device device) {
  return at::empty_strided(record.shape(), record.stride(),
                           at::TensorOptions().dtype(record.dtype()).device(device));
}

at::Tensor make_tensor(const TensorRecord& record, at::Device device) {
  return make_raw_tensor(record, device).requires_grad_(record.requires_grad());
}

void detail::add_list_difference(std::vector<std::string>& found, std::string_view name,
                                 const std::vector<std::int64_t>& expected,
                                 const std::vector<std::int64_t>& actual) {
  if (expected != actual) found.push_back(describe(name, shape_text(actual), shape_text(expected)));
}

std::vector<std::string> differences(const TensorRecord& expected, const TensorRecord& actual) {
  std::vector<std::string> found;
  detail::add_list_difference(found, "shape", expected.shape(), actual.shape());
  detail::add_list_difference(found, "stride", expected.stride(), actual.stride());
  if (expected.dtype() != actual.dtype())
    found.push_back(describe("dtype", dtype_name(actual.dtype()), dtype_name(expected.dtype())));
  return found;
}

std::vector<std::string> requires_grad_differences(const TensorRecord& expected, const TensorRecord& actual) {
  if (expected.requires_grad() == actual.requires_grad()) return {};
  return {describe("requires_grad", actual.requires_grad() ? "true" : "false",
                   expected.requires_grad() ? "true" : "false")};
}

std::string to_string(const TensorRecord& record) {
  std::string text = dtype_name(record.dtype()) + shape_text(record.shape());
  if (record.stride() != contiguous_stride(record.shape())) text += " stride " + shape_text(record.stride());
  if (record.requires_grad()) text += " requires_grad";
  return text;
}

}  // namespace penstock
