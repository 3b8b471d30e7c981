// The properties of a plain tensor that two stages must agree on: shape, stride, element type, and whether a
// gradient is sent back.
//
//   TensorRecord record = record_of(activation);
//   at::Tensor buffer = make_tensor(record, at::kCPU);       // same memory layout, ready to receive into
//   for (const auto& line : differences(expected, record)) ...
//
// A record is an immutable value with equality and a hash; it can be sent as a message
// (comm/record_messages.h). It does not contain devices, storage offsets or values. The memory layout is
// exact: a transposed view keeps its strides, and an expanded one its zeros, so a buffer created from it has
// overlapping elements like the original.
//
// requires_grad is part of the value (records that differ in it are not equal) but not of `differences`:
// whether a gradient flows depends on the run (training or evaluation), not on the contract. In static mode
// it determines which gradients are sent; use `requires_grad_differences` to compare it.
// Records of distributed tensors: tensor_meta.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

class TensorRecord {
 public:
  TensorRecord() = default;  // a float32 scalar

  // Throws ValueError for an impossible tensor: shape and stride of different lengths, a negative number,
  // 2^63 bytes or more, a quantized or unknown type, or an integer type that requires a gradient.
  TensorRecord(std::vector<std::int64_t> shape, std::vector<std::int64_t> stride, at::ScalarType dtype,
               bool requires_grad = false);
  static TensorRecord contiguous(std::vector<std::int64_t> shape, at::ScalarType dtype,
                                 bool requires_grad = false);

  const std::vector<std::int64_t>& shape() const { return shape_; }
  const std::vector<std::int64_t>& stride() const { return stride_; }
  at::ScalarType dtype() const { return dtype_; }
  bool requires_grad() const { return requires_grad_; }

  std::int64_t numel() const;
  // From the first element to the end of the last; less than numel() elements take if the tensor is expanded.
  std::int64_t storage_bytes() const;

  TensorRecord with_requires_grad(bool requires_grad) const;
  bool operator==(const TensorRecord&) const = default;
  std::size_t hash() const;

 private:
  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> stride_;
  at::ScalarType dtype_ = at::ScalarType::Float;
  bool requires_grad_ = false;
};

// Throws PipeliningMetadataError for a distributed tensor (use meta_of or distributed_record_of), and for
// tensors that these four fields cannot describe: undefined, sparse, nested, quantized.
TensorRecord record_of(const at::Tensor& tensor);

// Returns uninitialized memory of exactly this layout; requires_grad as recorded.
at::Tensor make_tensor(const TensorRecord& record, at::Device device);
// The same without setting requires_grad: for buffers that are wrapped or received into first.
at::Tensor make_raw_tensor(const TensorRecord& record, at::Device device);

// "shape: got [2, 3], expected [2, 4]": one line for each of shape, stride and dtype that differs; empty if
// they match.
std::vector<std::string> differences(const TensorRecord& expected, const TensorRecord& actual);

// The field that `differences` does not compare; empty if it is the same.
std::vector<std::string> requires_grad_differences(const TensorRecord& expected, const TensorRecord& actual);

// "float32[2, 3] stride [3, 1] requires_grad"; a contiguous stride is omitted.
std::string to_string(const TensorRecord& record);

namespace detail {

// Adds "NAME: got ACTUAL, expected EXPECTED" if the two differ.
void add_list_difference(std::vector<std::string>& found, std::string_view name,
                         const std::vector<std::int64_t>& expected, const std::vector<std::int64_t>& actual);

// Returns the record of the tensor's own attributes, whatever its dynamic type.
TensorRecord record_of_attributes(const at::Tensor& tensor);

}  // namespace detail

}  // namespace penstock

template <>
struct std::hash<penstock::TensorRecord> {
  std::size_t operator()(const penstock::TensorRecord& record) const { return record.hash(); }
};
