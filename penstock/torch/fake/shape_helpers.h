// Helpers for shape functions. Private to this folder.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/OptionalArrayRef.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "penstock/fake.h"
#include "penstock/torch/compat/version.h"

namespace penstock::detail {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;
using Sizes = std::vector<std::int64_t>;

// The value of at::Reduction::None.
inline constexpr std::int64_t kNoReduction = 0;

inline bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// Common allocations of kernels.
inline Tensor contiguous_like(const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); }
inline Tensor suggested_like(const Tensor& tensor) {
  return at::empty_like(tensor, tensor.options(), tensor.suggest_memory_format());
}
inline Tensor scalar_like(const Tensor& tensor) { return at::empty({}, tensor.options()); }
// Channels last if `like` is, as in pooling, padding and resampling kernels.
Tensor image_like(IntArrayRef sizes, const Tensor& like);

// What a pointwise kernel allocates for these inputs: broadcast sizes, strides in the order of the inputs'
// strides.
Tensor iterate(std::initializer_list<Tensor> inputs, at::ScalarType dtype);
Tensor iterate(at::ArrayRef<Tensor> inputs, at::ScalarType dtype);

// The sizes without dimension `dim`, or with 1 there.
Sizes reduced_sizes(const Tensor& tensor, std::int64_t dim, bool keepdim);
// Over several dimensions; an empty list means all.
Sizes reduced_sizes(const Tensor& tensor, at::OptionalIntArrayRef dims, bool keepdim);

// Mixed precision on the CPU: half-precision input with float parameters keeps statistics in float.
bool mixed_types(const Tensor& input, std::initializer_list<OptionalTensor> parameters);

// The device that the current call would run on: shape functions only see the meta device, and some kernels
// differ.
at::Device shape_device();
class ShapeDeviceScope {
 public:
  explicit ShapeDeviceScope(at::Device device);
  ~ShapeDeviceScope();
  ShapeDeviceScope(const ShapeDeviceScope&) = delete;
  ShapeDeviceScope& operator=(const ShapeDeviceScope&) = delete;

 private:
  at::Device before_;
};

// Returns whether LibTorch itself can run the operator on the meta device, as far as can be determined
// without trying: a composite kernel may call an operator that cannot.
bool has_meta_kernel(const c10::OperatorHandle& op);

// Registers the function if LibTorch has the operator but no kernel for the meta device.
template <class Function>
void register_where_missing(const std::string& op, Function function);

// For tables of operators that share a boxed function; `only_missing` as above.
using BoxedFunction = void(const c10::OperatorHandle&, torch::jit::Stack*);
template <BoxedFunction* function>
void register_boxed(const std::string& op, bool only_missing = true);

c10::optional<c10::OperatorHandle> find_operator(const std::string& op);

// A list of one value means that value in every dimension.
inline std::int64_t at_dim(at::IntArrayRef values, std::size_t dim) {
  return values.size() == 1 ? values[0] : values[dim];
}

// ---- implementation ----

template <class Function>
void register_where_missing(const std::string& op, Function function) {
  const auto handle = find_operator(op);
  if (handle && !has_meta_kernel(*handle)) register_shape_function(op, function);
}

template <BoxedFunction* function>
void register_boxed(const std::string& op, bool only_missing) {
  const auto handle = find_operator(op);
  if (handle && !(only_missing && has_meta_kernel(*handle)))
    add_shape_function(op, c10::KernelFunction::makeFromBoxedFunction<function>(), -1);
}

}  // namespace penstock::detail
