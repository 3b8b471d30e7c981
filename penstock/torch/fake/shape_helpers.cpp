#include "penstock/torch/fake/shape_helpers.h"

#include <ATen/TensorIterator.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

namespace penstock::detail {
namespace {

thread_local at::Device current_device = at::kCPU;

}  // namespace

at::Device shape_device() { return current_device; }

ShapeDeviceScope::ShapeDeviceScope(at::Device device) : before_(current_device) { current_device = device; }
ShapeDeviceScope::~ShapeDeviceScope() { current_device = before_; }

Tensor image_like(IntArrayRef sizes, const Tensor& like) {
  const at::MemoryFormat format = like.suggest_memory_format();
  const bool fits = (format == at::MemoryFormat::ChannelsLast && sizes.size() == 4) ||
                    (format == at::MemoryFormat::ChannelsLast3d && sizes.size() == 5);
  return at::empty(sizes, like.options(), fits ? format : at::MemoryFormat::Contiguous);
}

Tensor iterate(at::ArrayRef<Tensor> inputs, at::ScalarType dtype) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false).declare_static_dtype_and_device(dtype,
                                                                                                  at::kMeta);
  config.add_owned_output(Tensor());
  for (const Tensor& input : inputs) config.add_owned_input(input);
  return config.build().output();
}

Tensor iterate(std::initializer_list<Tensor> inputs, at::ScalarType dtype) {
  return iterate(at::ArrayRef<Tensor>(inputs.begin(), inputs.size()), dtype);
}

Sizes reduced_sizes(const Tensor& tensor, std::int64_t dim, bool keepdim) {
  const std::int64_t one[] = {dim};
  return tensor.dim() == 0 ? Sizes{}
                           : reduced_sizes(tensor, at::OptionalIntArrayRef(IntArrayRef(one)), keepdim);
}

Sizes reduced_sizes(const Tensor& tensor, at::OptionalIntArrayRef dims, bool keepdim) {
  std::vector<bool> reduced(static_cast<std::size_t>(tensor.dim()), !dims.has_value() || dims->empty());
  if (dims.has_value() && tensor.dim() > 0)
    for (const std::int64_t dim : *dims)
      reduced[static_cast<std::size_t>(at::maybe_wrap_dim(dim, tensor.dim()))] = true;
  Sizes sizes;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (!reduced[static_cast<std::size_t>(i)])
      sizes.push_back(tensor.size(i));
    else if (keepdim)
      sizes.push_back(1);
  }
  return sizes;
}

bool mixed_types(const Tensor& input, std::initializer_list<OptionalTensor> parameters) {
  if (input.scalar_type() != at::kHalf && input.scalar_type() != at::kBFloat16) return false;
  return std::any_of(parameters.begin(), parameters.end(), [](const OptionalTensor& parameter) {
    return given(parameter) && parameter->scalar_type() == at::kFloat;
  });
}

bool has_meta_kernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  // Not the computed kernel: newer versions have a fallback for the meta device that only throws.
  return op.hasKernelForDispatchKey(DispatchKey::Meta) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

c10::optional<c10::OperatorHandle> find_operator(const std::string& op) {
  const auto dot = op.find('.');
  return c10::Dispatcher::singleton().findSchema(
      {op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1)});
}

}  // namespace penstock::detail
