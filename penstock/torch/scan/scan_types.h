// Shared by the operators of this folder.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>

namespace penstock::detail {

using OptionalTensor = c10::optional<at::Tensor>;

// Operators take an absent tensor as an empty optional; C++ interfaces as an undefined tensor.
inline OptionalTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}
inline at::Tensor or_undefined(const OptionalTensor& tensor) {
  return tensor.has_value() ? *tensor : at::Tensor();
}

// The dtype in which values of a dtype are summed: float64 for float64, otherwise float32.
inline at::ScalarType real_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline std::string sizes_text(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes().begin(), tensor.sizes().end(), ", "));
}

// Through the dispatcher, so that modes see the operator.
template <class Signature>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Within a kernel: LibTorch's operators run without autograd, and without autocast, which would round the
// float32 operands of products.
class PlainScope {
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::impl::ExcludeDispatchKeyGuard casts_{c10::autocast_dispatch_keyset};
};

}  // namespace penstock::detail
